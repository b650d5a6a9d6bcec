"""What happens to what clients send, by API: one table for the code and for the documentation.

A name is applied if some server acts on it, and accepted without effect if only a hosted service could act on
it. Other names are errors, whether a table lists them or not.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jengine import InvalidArgument

log = logging.getLogger("jengine.serving")

Outcome = Literal["applied", "accepted", "error"]
# Notes by name. A name is a field, `FIELD.MEMBER`, or `FIELD: VALUE` for the types of a list's members.
Policy = Mapping[Outcome, Mapping[str, str]]


def same(note: str, *names: str) -> dict[str, str]:
    """Several names with one note."""
    return dict.fromkeys(names, note)


HOSTED = "left out of the prompt, and of the answer's `tools`"
UNREADABLE = "this server cannot read it"
AS_CALL, AS_RESULT = "shown as a call", "shown as the result of a call"
RUN_ELSEWHERE = "shown as a call with its result"

RESPONSES: Policy = {
    "applied": {
        "input": "a text or a list of items",
        "instructions": "the first system message; those of an earlier response are not repeated",
        "previous_response_id": "the items of a response that the server still has come first",
        "store": "true by default",
        **same(
            "",
            "model", "stream", "max_output_tokens", "temperature", "top_p", "top_logprobs",
            "tools: function", "tool_choice: function", "tool_choice: custom",
        ),
        "max_tool_calls": "further calls are left out of the answer",
        "parallel_tool_calls": "false: at most one call",
        "metadata": "returned",
        "include: message.output_text.logprobs": "log probabilities of the tokens of messages",
        "reasoning.effort": "the chat template's `reasoning_effort`; `none` turns thinking off",
        "text.format": "`json_schema` and `json_object` constrain answers that are text",
        "tools: namespace": "the model sees each function as `NAMESPACE__NAME`; calls have both parts again",
        "tools: custom": "text, a regular expression, or a Lark grammar; forced calls follow these",
        "tool_choice": "`none`, `auto`, `required`, or an object",
        "tool_choice: allowed_tools": "the model sees only these tools",
        "input: message": "texts, images by URL, refusals",
        "input: function_call": "arguments may be any text, also if they were cut off",
        **same(
            AS_RESULT,
            "input: function_call_output", "input: custom_tool_call_output",
            "input: local_shell_call_output", "input: shell_call_output", "input: apply_patch_call_output",
        ),
        **same(
            AS_CALL,
            "input: custom_tool_call", "input: local_shell_call", "input: shell_call",
            "input: apply_patch_call",
        ),
        "input: reasoning": "its text or summary; `encrypted_content` has no effect",
        "input: item_reference": "an output item of a response that the server still has",
        **same(
            RUN_ELSEWHERE,
            "input: web_search_call", "input: file_search_call", "input: code_interpreter_call",
            "input: mcp_call",
        ),
    },
    "accepted": {
        **same(
            "",
            "client_metadata", "prompt_cache_options", "prompt_cache_retention", "access_programs", "image",
            "reasoning.generate_summary", "reasoning.context", "reasoning.mode", "text.verbosity",
            "include: file_search_call.results", "include: web_search_call.results",
            "include: web_search_call.action.sources", "include: message.input_image.image_url",
            "include: computer_call_output.output.image_url", "include: code_interpreter_call.outputs",
            "tools.output_schema", "tools.cache_control", "tools.allowed_callers", "tools.async",
        ),
        **same("returned", "user", "safety_identifier"),
        "prompt_cache_key": "returned; equal prefixes are found without it",
        "service_tier": "there is one; the answer says `default`",
        "context_management": "a conversation that is too long is an error",
        "reasoning.summary": "reasoning is returned whole",
        "stream_options.include_obfuscation": "events have no padding",
        "include: reasoning.encrypted_content": "reasoning is returned as text",
        "input: compaction": f"{UNREADABLE}; a note in the prompt says that earlier turns are missing",
        **same(
            HOSTED,
            "tools: web_search", "tools: web_search_2025_08_26", "tools: web_search_preview",
            "tools: web_search_preview_2025_03_11", "tools: file_search", "tools: code_interpreter",
            "tools: image_generation", "tools: mcp", "tools: computer", "tools: computer_use_preview",
            "tools: local_shell", "tools: shell", "tools: apply_patch", "tools: tool_search",
            "tools: programmatic_tool_calling",
        ),
        "tools.strict": "forced calls follow their schemas in any case",
        "tools.defer_loading": "all tools are shown",
    },
    "error": {
        "background": "must be false",
        "background_options": "this server answers no requests in the background",
        "conversation": "this server keeps no conversations: use previous_response_id",
        "prompt": "this server keeps no prompts: send it in input",
        "truncation": "must be disabled",
        "moderation": "this server does not moderate",
        "max_tokens": "the name is max_output_tokens",
        "n": "must be 1",
        "logprobs": "use include and top_logprobs",
        "prompt_logprobs": "only /v1/completions and /v1/chat/completions have them",
        **same(UNREADABLE, "input: image_generation_call", "input: computer_call"),
    },
}  # fmt: skip
SWITCH = "the chat template's `enable_thinking` and `thinking`; `adaptive` and `auto` let the model choose"
BUDGET = "ends each thought after so many tokens, if the model thinks, as `thinking_token_budget` does"
EFFORT = "the chat template's `reasoning_effort`"
CACHED = "equal prefixes are found without it; `cache_salt` keeps them apart"
ONE_TIER = "there is one; `priority` orders requests"
# Beside these fields: sampling parameters, vLLM's fields, and those that every server has.
CHAT: Policy = {
    "applied": {
        **same(f"{EFFORT}; `none` turns thinking off", "reasoning_effort", "reasoning.effort"),
        **same(SWITCH, "reasoning.enabled", "enable_thinking", "thinking", "thinking.type"),
        **same(
            BUDGET,
            "reasoning.max_tokens", "thinking.budget_tokens", "thinking_budget", "thinking_budget_tokens",
        ),
        "reasoning.exclude": "true hides the reasoning, as `include_reasoning: false` does",
    },
    "accepted": {
        "store": "no chat is kept",
        **same("", "metadata", "verbosity"),
        **same("keys tell clients apart", "user", "safety_identifier"),
        **same(CACHED, "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        "service_tier": ONE_TIER,
        "prediction": "[speculation](../guides/scheduling.md#speculative-decoding) drafts from the prompt",
    },
    "error": {
        "tools.type": "must be function; /v1/responses has custom tools",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "this server writes no audio",
        "moderation": "this server does not moderate",
        "web_search_options": "this server searches nothing",
    },
}  # fmt: skip
MESSAGES: Policy = {
    "applied": {
        "thinking.type": SWITCH,
        "thinking.budget_tokens": BUDGET,
        "thinking.display": "`omitted` hides the thinking",
        "output_config.effort": EFFORT,
        "output_config.format": "constrains answers that are text",
    },
    "accepted": {
        **same("", "metadata", "diagnostics", "inference_geo", "user_profile_id", "workspace_id"),
        **same(ONE_TIER, "service_tier", "speed"),
        "cache_control": CACHED,
    },
    "error": {
        # unlike /v1/responses, an answer has no list of tools that could show that one was left out
        "tools.type": "must be custom: this server has none of Anthropic's tools",
        **same("this server runs no tools itself", "container", "mcp_servers"),
        "n": "must be 1",
        **same("only /v1/completions and /v1/chat/completions have them", "logprobs", "prompt_logprobs"),
        "stop": "the name is stop_sequences",
    },
}  # fmt: skip
POLICIES: Mapping[str, Policy] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}


def fields(policy: Policy, outcome: Outcome) -> frozenset[str]:
    """The fields of a request with this outcome."""
    return frozenset(name for name in policy[outcome] if name.isidentifier())


def names_after(start: str, policy: Policy, outcome: Outcome) -> frozenset[str]:
    """What follows `start` in names with this outcome: `FIELD.` for a field's members, `FIELD: ` for its
    values, or the types of its parts.
    """
    return frozenset(name.removeprefix(start) for name in policy[outcome] if name.startswith(start))


def check_fields(policy: Policy, body: Mapping[str, Any], neutral: Mapping[str, object]) -> None:
    """Raises InvalidArgument for a field that is an error, unless its value is null or neutral."""
    errors = policy["error"]
    for name, value in body.items():
        if name in errors and value is not None and not (name in neutral and neutral[name] == value):
            raise InvalidArgument(name, value, errors[name])


def log_accepted(path: str, names: Iterable[str]) -> None:
    """Logs names without effect that a request has, each once."""
    for name in names:
        if name in POLICIES[path]["accepted"]:
            _log_once(path, name)


@functools.cache  # at most one entry for each name in the tables
def _log_once(path: str, name: str) -> None:
    note = POLICIES[path]["accepted"][name]
    log.info("%s: %s has no effect%s", path, name, f": {note}" if note else "")
