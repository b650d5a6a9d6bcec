"""Nine client libraries and a real model: what they send is accepted, and answers have the form that they ask
for, whatever a small model says. `python cells.py URL MODEL [CLIENT...]` prints a table of
what each did; docs/service/http.md lists the libraries.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from common import BASE, URL  # isort: skip  sets variables that the others read

import anthropic
import instructor
import litellm
import openai
from agents import Agent, MaxTurnsExceeded, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = sys.argv[2]
COLUMNS = ("text", "stream", "tools auto", "tools required", "second turn", "schema", "agent")
ASKED, RESULT = "What is the weather in Rome?", "It rains in Rome."
LENGTH = 60  # tokens of an answer
Cell = Callable[[], Any]  # raises an error, or returns what must be true


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Oslo"]
    rain: bool


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


class Question(BaseModel):
    city: Literal["Rome", "Oslo"]


FUNCTION = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": Question.model_json_schema(),
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
USER = {"role": "user", "content": ASKED}
TURNS = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
]


def is_call(name: str, arguments: Any) -> bool:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return name == "weather" and set(given) == {"city"} and given["city"] in ("Rome", "Oslo")


def chat_completions(create: Callable[..., Any], parsed: Callable[[Any], Any]) -> dict[str, Cell]:
    """OpenAI's own client, and LiteLLM, whose answers have the same form."""

    def message(messages: Any = (USER,), **more: Any) -> Any:
        return create(messages=[*messages], **more).choices[0].message

    def stream() -> bool:
        chunks = [*create(messages=[USER], stream=True)]
        return len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 1

    def auto() -> bool:
        said = message(tools=TOOLS)
        return bool(said.content or said.tool_calls)

    def required() -> bool:
        [call, *_] = message(tools=TOOLS, tool_choice="required").tool_calls
        return is_call(call.function.name, call.function.arguments)

    def second() -> bool:
        said = message(TURNS, tools=TOOLS)
        return bool(said.content or said.tool_calls)

    def schema() -> Weather:
        return Weather.model_validate_json(message(response_format=parsed(Weather)).content)

    return dict(
        zip(COLUMNS, (lambda: message().content, stream, auto, required, second, schema), strict=False)
    )


def of_openai() -> dict[str, Cell]:
    def create(**more: Any) -> Any:
        make = openai.OpenAI().chat.completions.create
        return make(model=MODEL, max_tokens=LENGTH, temperature=0, **more)

    def parsed(of: type[BaseModel]) -> Any:
        return {"type": "json_schema", "json_schema": {"name": "weather", "schema": of.model_json_schema()}}

    return chat_completions(create, parsed)


def of_litellm() -> dict[str, Cell]:
    given = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "max_tokens": LENGTH}
    return chat_completions(lambda **more: litellm.completion(temperature=0, **given, **more), lambda of: of)


def of_anthropic() -> dict[str, Cell]:
    messages = anthropic.Anthropic(base_url=BASE).messages
    given: dict[str, Any] = {"model": MODEL, "max_tokens": LENGTH, "extra_body": {"temperature": 0}}
    tools = [{"name": "weather", "input_schema": FUNCTION["parameters"]}]
    asked = [USER]
    turns = [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": RESULT}]},
    ]

    def text() -> str:
        return messages.create(messages=asked, **given).content[0].text

    def stream() -> bool:
        with messages.stream(messages=asked, **given) as events:
            return len([*events.text_stream]) > 1

    def required() -> bool:
        answer = messages.create(messages=asked, tools=tools, tool_choice={"type": "any"}, **given)
        [call, *_] = [part for part in answer.content if part.type == "tool_use"]
        return is_call(call.name, call.input)

    def schema() -> Any:
        return messages.parse(messages=asked, output_format=Weather, **given).parsed_output

    return {
        "text": text,
        "stream": stream,
        "tools auto": lambda: messages.create(messages=asked, tools=tools, **given).content,
        "tools required": required,
        "second turn": lambda: messages.create(messages=turns, tools=tools, **given).content,
        "schema": schema,
    }


def langchain(make: Callable[..., Any]) -> dict[str, Cell]:
    model, tools = make(), [tool(weather)]
    turns = [
        HumanMessage(ASKED),
        AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Rome"}, "id": "call_1"}]),
        ToolMessage(RESULT, tool_call_id="call_1"),
    ]

    def stream() -> bool:
        return len([part for part in model.stream(ASKED) if str(part.text)]) > 1

    def required() -> bool:
        [call, *_] = model.bind_tools(tools, tool_choice="any").invoke(ASKED).tool_calls
        return is_call(call["name"], call["args"])

    def agent() -> bool:
        try:
            given = {"messages": [("user", ASKED)]}
            return bool(create_react_agent(model, tools).invoke(given, {"recursion_limit": 8})["messages"])
        except GraphRecursionError:  # the model calls again and again
            return True

    def auto(messages: Any) -> bool:
        said = model.bind_tools(tools).invoke(messages)
        return bool(str(said.text) or said.tool_calls or said.invalid_tool_calls)

    return {
        "text": lambda: str(model.invoke(ASKED).text),
        "stream": stream,
        "tools auto": lambda: auto(ASKED),
        "tools required": required,
        "second turn": lambda: auto(turns),
        "schema": lambda: model.with_structured_output(Weather, method="json_schema").invoke(ASKED),
        "agent": agent,
    }


def of_llama_index() -> dict[str, Cell]:
    model = OpenAILike(
        model=MODEL,
        api_base=URL,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=8192,
        max_tokens=LENGTH,
        temperature=0.0,
    )
    tools = [FunctionTool.from_defaults(weather, fn_schema=Question)]
    call = ToolCallBlock(tool_call_id="call_1", tool_name="weather", tool_kwargs={"city": "Rome"})
    turns = [
        ChatMessage(role=MessageRole.USER, content=ASKED),
        ChatMessage(role=MessageRole.ASSISTANT, blocks=[call]),
        ChatMessage(role=MessageRole.TOOL, content=RESULT, additional_kwargs={"tool_call_id": "call_1"}),
    ]

    def auto(**given: Any) -> bool:
        said = model.chat_with_tools(tools, **given)
        calls = model.get_tool_calls_from_response(said, error_on_no_tool_call=False)
        return bool(said.message.content or calls)

    def required() -> bool:
        said = model.chat_with_tools(tools, user_msg=ASKED, tool_required=True)
        [call, *_] = model.get_tool_calls_from_response(said)
        return is_call(call.tool_name, call.tool_kwargs)

    async def agent() -> Any:
        return await FunctionAgent(tools=tools, llm=model, streaming=False).run(ASKED, max_iterations=4)

    def agent_ends() -> bool:
        try:
            return bool(asyncio.run(agent()))
        except Exception as error:
            return "iterations" in str(error) or _raise(error)

    return {
        "text": lambda: model.chat(turns[:1]).message.content,
        "stream": lambda: len([part for part in model.stream_chat(turns[:1]) if part.delta]) > 1,
        "tools auto": lambda: auto(user_msg=ASKED),
        "tools required": required,
        "second turn": lambda: auto(chat_history=turns),
        "schema": lambda: model.as_structured_llm(Weather).chat(turns[:1]).raw,
        "agent": agent_ends,
    }


def _raise(error: Exception) -> bool:
    raise error


def of_instructor() -> dict[str, Cell]:
    """It always asks for an object: by a tool that must be called, or a schema. It has no agents."""

    def ask(mode: instructor.Mode, of: Any = Weather, **more: Any) -> Any:
        client = instructor.from_openai(openai.OpenAI(), mode=mode)
        given = {"model": MODEL, "max_tokens": LENGTH, "temperature": 0, "max_retries": 1}
        return client.chat.completions.create(messages=[USER], response_model=of, **given, **more)

    return {
        "text": lambda: ask(instructor.Mode.TOOLS, None).choices[0].message.content,
        "stream": lambda: [*ask(instructor.Mode.JSON_SCHEMA, instructor.Partial[Weather], stream=True)][-1],
        "tools required": lambda: ask(instructor.Mode.TOOLS),
        "schema": lambda: ask(instructor.Mode.JSON_SCHEMA),
    }


def of_pydantic_ai() -> dict[str, Cell]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
    given: dict[str, Any] = {"model_settings": {"max_tokens": LENGTH, "temperature": 0.0}}
    given["usage_limits"] = UsageLimits(request_limit=4)
    call = ToolCallPart("weather", {"city": "Rome"}, "call_1")
    turns = [
        ModelRequest([UserPromptPart(ASKED)]),
        ModelResponse([call]),
        ModelRequest([ToolReturnPart("weather", RESULT, "call_1")]),
    ]

    def run(asked: str | None = ASKED, *, tools: Any = (), of: Any = str, history: Any = None) -> Any:
        agent = PydanticAgent(model, tools=tools, output_type=of)
        try:
            return agent.run_sync(asked, message_history=history, **given).output
        except UsageLimitExceeded:
            return True

    async def streamed() -> list[str]:
        async with PydanticAgent(model).run_stream(ASKED, **given) as answer:
            return [part async for part in answer.stream_text(delta=True, debounce_by=None)]

    return {
        "text": run,
        "stream": lambda: len(asyncio.run(streamed())) > 1,
        "tools auto": lambda: run(tools=[weather]),
        "tools required": lambda: run(of=ToolOutput(Weather)),
        "second turn": lambda: run(None, tools=[weather], history=turns),
        "schema": lambda: run(of=NativeOutput(Weather)),
        "agent": lambda: run(tools=[weather]),
    }


def of_openai_agents() -> dict[str, Cell]:
    turns = [
        USER,
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
    ]

    def agent(**more: Any) -> Any:
        chat = OpenAIChatCompletionsModel(MODEL, openai.AsyncOpenAI(base_url=URL, api_key="none"))
        settings = ModelSettings(max_tokens=LENGTH, temperature=0.0, tool_choice=more.pop("choice", None))
        return Agent(name="a", instructions="Be brief.", model=chat, model_settings=settings, **more)

    def run(asked: Any = ASKED, **more: Any) -> Any:
        try:
            return Runner.run_sync(agent(**more), asked, max_turns=4).final_output
        except MaxTurnsExceeded:
            return True

    async def streamed() -> list[str]:
        answer = Runner.run_streamed(agent(), ASKED)
        events = [event async for event in answer.stream_events() if event.type == "raw_response_event"]
        return [event.data.delta for event in events if event.data.type == "response.output_text.delta"]

    tools = [function_tool(weather)]
    return {
        "text": run,
        "stream": lambda: len(asyncio.run(streamed())) > 1,
        "tools auto": lambda: run(tools=tools),
        "tools required": lambda: run(
            tools=tools, choice="required", tool_use_behavior="stop_on_first_tool"
        ).startswith("It rains in "),
        "second turn": lambda: run(turns, tools=tools),
        "schema": lambda: run(output_type=Weather),
        "agent": lambda: run(tools=tools),
    }


CHAT: dict[str, Any] = {"model": MODEL, "max_tokens": LENGTH, "temperature": 0}
CLIENTS: dict[str, Callable[[], dict[str, Cell]]] = {
    "openai": of_openai,
    "anthropic": of_anthropic,
    "litellm": of_litellm,
    "langchain-openai": lambda: langchain(lambda: ChatOpenAI(base_url=URL, **CHAT)),
    "langchain-anthropic": lambda: langchain(lambda: ChatAnthropic(base_url=BASE, **CHAT)),
    "llama-index": of_llama_index,
    "instructor": of_instructor,
    "pydantic-ai": of_pydantic_ai,
    "openai-agents": of_openai_agents,
}


def main() -> None:
    print(f"| | {' | '.join(COLUMNS)} |\n|{' --- |' * (1 + len(COLUMNS))}")
    failed = 0
    for name in sys.argv[3:] or CLIENTS:
        cells, row = CLIENTS[name](), []
        for column in COLUMNS:
            try:
                row.append("yes" if column in cells and cells[column]() else "no" if column in cells else "")
            except Exception as error:
                traceback.print_exception(error)
                row.append("no")
        print(f"| {name} | {' | '.join(row)} |", flush=True)
        failed += row.count("no")
    raise SystemExit(failed)


main()
