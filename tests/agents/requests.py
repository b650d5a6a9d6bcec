"""Requests in the forms that agents send, in few words. Texts have marks, which the model must see."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]


def _function(name: str, **more: Any) -> Body:
    parameters = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "a line"}},
        "required": ["command"],
    }
    function = {"name": name, "description": "Runs a line.", "parameters": parameters, **more}
    return {"type": "function", "function": function}


def _call(name: str, id: str = "call_1", arguments: str = '{"command": "ls mark-args"}') -> Body:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


STREAM: Body = {"stream": True, "stream_options": {"include_usage": True}}
# texts in parts, some of them reminders before the question
QWEN_CODE: Body = {
    "messages": [
        {"role": "system", "content": "You are a programmer. mark-sys"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<reminder>\nIt is Friday. mark-rem\n</reminder>"},
                {"type": "text", "text": "What is here? mark-ask"},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [_call("run_shell_command")]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "text", "text": "Output: mark-out\nExit Code: 0"}],
        },
        {"role": "assistant", "content": "A file. mark-ans"},
        {"role": "user", "content": [{"type": "text", "text": "And now? mark-end"}]},
    ],
    "max_tokens": 32000,
    **STREAM,
    "tools": [_function("run_shell_command"), _function("read_file")],
}
OPENCODE: Body = {
    "max_tokens": 4096,
    "messages": [
        {"role": "system", "content": "You are a programmer. mark-sys"},
        {"role": "user", "content": "What is here? mark-ask"},
        {"role": "assistant", "content": "", "tool_calls": [_call("bash")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "mark-out\n"},
    ],
    "tools": [_function("bash"), _function("edit")],
    "tool_choice": "auto",
    **STREAM,
}
# examples as turns, and no tools
AIDER: Body = {
    "messages": [
        {"role": "system", "content": "You edit files. mark-sys"},
        {"role": "user", "content": "Change the greeting. mark-ask"},
        {"role": "assistant", "content": "Ok: mark-ans"},
        {"role": "user", "content": "These are my files. mark-file"},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "Rename the class. mark-end"},
    ],
    "stream": True,
    "temperature": 0,
}
# what OpenAI's client made of an answer, sent back as it is
MINI_SWE_AGENT: Body = {
    "messages": [
        {"role": "system", "content": "You are a programmer. mark-sys"},
        {"role": "user", "content": "What is here? mark-ask"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"index": 0, **_call("bash")}],
            "function_call": None,
            "provider_specific_fields": {"refusal": None},
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "<output>\nmark-out</output>"},
    ],
    "tools": [_function("bash")],
}
# one system message with the tools' descriptions in words, results in the user's name, each answer a call
SMOLAGENTS: Body = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Solve the task. mark-sys"}]},
        {"role": "user", "content": [{"type": "text", "text": "New task: mark-ask"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Calling tools: [mark-args]"}]},
        {"role": "user", "content": [{"type": "text", "text": "Observation:\nmark-out"}]},
    ],
    "stop": ["Observation:", "Calling tools:"],
    "tools": [
        _function("look", parameters={"type": "object", "properties": {}, "required": []}),
        _function(
            "final_answer",
            parameters={
                "type": "object",
                "properties": {"answer": {"type": "string"}},
                "required": ["answer"],
            },
        ),
    ],
    "tool_choice": "required",
    **STREAM,
}
# null and empty lists for what there is not
LLM: Body = {
    "messages": [
        {"role": "user", "content": "What is here? mark-ask"},
        {"role": "assistant", "content": None, "tool_calls": [_call("look")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "mark-out"},
        {"role": "assistant", "content": "A file. mark-ans", "refusal": None, "annotations": []},
        {"role": "user", "content": "And now? mark-end"},
    ],
    "tools": [_function("look")],
    **STREAM,
}
AI_SDK: Body = {
    "messages": [
        {"role": "user", "content": "What is here? mark-ask"},
        {"role": "assistant", "content": "", "tool_calls": [_call("look"), _call("look", "call_2")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "mark-out"},
        {"role": "tool", "tool_call_id": "call_2", "content": '{"type": "text", "value": "mark-two"}'},
    ],
    "tools": [_function("look", strict=False)],
    "tool_choice": "auto",
    **STREAM,
}
HOSTED_CHAT: Body = {  # what clients of OpenAI's service send to every server
    "messages": [{"role": "developer", "content": "mark-dev"}, {"role": "user", "content": "mark-ask"}],
    "store": False,
    "metadata": {"session": "1"},
    "prompt_cache_key": "key",
    "safety_identifier": "me",
    "service_tier": "auto",
    "verbosity": "low",
    "reasoning_effort": "medium",
    "max_completion_tokens": 900,
    "parallel_tool_calls": True,
    "tools": [_function("look")],
}
CLAUDE_CODE: Body = {
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "You are a programmer. mark-sys", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<reminder>mark-rem</reminder>"},
                {"type": "text", "text": "What is here? mark-ask"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls mark-args"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": "mark-out",
                    "is_error": False,
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
    ],
    "tools": [{"name": "Bash", "description": "Runs a line.", "input_schema": {"type": "object"}}],
    "metadata": {"user_id": "me"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stream": True,
}
CHATS = {
    "qwen-code": QWEN_CODE,
    "opencode": OPENCODE,
    "aider": AIDER,
    "mini-swe-agent": MINI_SWE_AGENT,
    "smolagents": SMOLAGENTS,
    "llm": LLM,
    "ai-sdk": AI_SDK,
    "hosted": HOSTED_CHAT,
}
REQUESTS = {
    **{name: ("/chat/completions", body) for name, body in CHATS.items()},
    "claude-code": ("/messages", CLAUDE_CODE),
}
CODEX: Body = {
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You are a programmer. mark-dev"}],
        },
        {
            "type": "message",
            "id": "msg_2",
            "role": "developer",
            "content": [
                {"type": "input_text", "text": "Skills: none. mark-skill"},
                {"type": "input_text", "text": "Permissions: all. mark-perm"},
            ],
        },
        {
            "type": "message",
            "id": "msg_3",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment>mark-env</environment>"}],
        },
        {
            "type": "message",
            "id": "msg_4",
            "role": "user",
            "content": [{"type": "input_text", "text": "What is here? mark-ask"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": None,
        },
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1",
            "name": "exec_command",
            "arguments": '{"cmd": "ls mark-args"}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "mark-out"},
        # a second turn brings instructions in its midst
        {
            "type": "message",
            "status": "completed",
            "id": "msg_5",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "A file. mark-ans", "annotations": []}],
        },
        {
            "type": "message",
            "id": "msg_6",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Now read only. mark-later"}],
        },
        {
            "type": "message",
            "id": "msg_7",
            "role": "user",
            "content": [{"type": "input_text", "text": "And now? mark-end"}],
        },
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a line.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
        },
        {
            "type": "namespace",
            "name": "agents",
            "description": "Others.",
            "tools": [{"type": "function", "name": "ask", "strict": False, "parameters": {"type": "object"}}],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "key",
    "client_metadata": {"session_id": "1", "turn_id": "2"},
}
AI_SDK_RESPONSES: Body = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "What is here? mark-ask"}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"word": "mark-args"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "mark-out"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        }
    ],
    "tool_choice": "auto",
    "stream": True,
}
REQUESTS |= {"codex": ("/responses", CODEX), "ai-sdk-responses": ("/responses", AI_SDK_RESPONSES)}
