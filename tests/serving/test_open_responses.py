"""The checks of the Open Responses specification (2026-04-24) in our own form, over a socket. Where it
differs from OpenAI's API, the server follows OpenAI; docs/service/http.md lists where.

Images are checked in test_http_images.py. Not supported, so without a check: WebSocket (seven of the
specification's) and /v1/responses/compact (two). Clients get an error that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response
from pydantic import ValidationError

from jengine.serving.http import blocks
from jengine.serving.http.responses import reply
from tests.serving.conftest import MockServer, serve_mock
from tests.serving.echo import serve_echo
from tests.serving.open_responses import ERROR, EVENT, RESPONSE
from tests.serving.test_http_responses import EVENT as OPENAI_EVENT
from tests.serving.test_http_responses import THOUGHT, WEATHER, asked, events, post, raw
from tests.serving.test_http_tools import CALL, END

TOOL = {name: value for name, value in WEATHER.items() if name != "strict"}
OPENAI_ONLY = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}
REQUESTS: dict[str, dict[str, Any]] = {
    "a text": asked("One two."),
    "a system prompt": asked(
        "", input=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi." + END}]
    ),
    "several turns": asked(
        "",
        input=[
            {"type": "message", "role": "user", "content": "I am Ada."},
            {"type": "message", "role": "assistant", "content": "Hi.", "phase": "commentary"},
            {"type": "message", "role": "user", "content": "Who am I?" + END},
        ],
    ),
    "a call": asked(CALL, tools=[TOOL]),
    "reasoning, a text and a call": asked(THOUGHT + "It rains.\n" + CALL, tools=[TOOL]),
    "a forced call": asked(
        '{"city": "Oslo"}', tools=[TOOL], tool_choice={"type": "function", "name": "weather"}
    ),
    "allowed tools": asked(
        "Hi.",
        tools=[TOOL],
        tool_choice={
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "weather"}],
        },
    ),
    "a schema": asked(
        "{}", text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    ),
    "every field": asked(
        "Hi.",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        metadata={"a": "b"},
        reasoning={"effort": "low", "summary": "none", "context": "auto"},
        text={"verbosity": "low"},
        safety_identifier="a",
        prompt_cache_key="b",
        service_tier="flex",
        max_tool_calls=1,
        store=False,
    ),
    "too few tokens": asked("A long text.", max_output_tokens=2),
}
STATUSES = {"too few tokens": "incomplete"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockServer]:
    with serve_echo(tmp_path_factory.mktemp("echo")) as server:
        yield server


def check(answer: dict[str, Any], status: str) -> None:
    """Valid in both schemas."""
    RESPONSE.validate_python(answer)
    Response.model_validate(answer, strict=True)
    assert answer["status"] == status and (answer["completed_at"] is None) == (status != "completed")
    assert answer["output"]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_whole_answer(server: MockServer, name: str) -> None:
    check(post(server, **raw(REQUESTS[name])).json(), STATUSES.get(name, "completed"))


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream(server: MockServer, name: str) -> None:
    found = events(server, **raw(REQUESTS[name]))  # checks names and numbers of events
    for event in found:
        OPENAI_EVENT.validate_python(event)
        EVENT.validate_python({**event, "type": OPENAI_ONLY.get(event["type"], event["type"])})
    check(found[-1]["response"], STATUSES.get(name, "completed"))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["completed_at"] is None for event in found[:2])


def test_the_events_of_a_call(server: MockServer) -> None:
    found = events(server, **raw(REQUESTS["a call"]))
    kinds = [event["type"] for event in found if event.get("item", {}).get("type") == "function_call"]
    assert kinds == ["response.output_item.added", "response.output_item.done"]
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= {
        event["type"] for event in found
    }


def test_a_call_and_its_result(server: MockServer) -> None:
    first = post(server, **raw(REQUESTS["a forced call"])).json()
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain" + END}
    answer = post(server, **{**raw(asked("", tools=[TOOL])), "input": [call, result]}).json()
    check(answer, "completed")
    assert answer["output"][0]["content"][0]["text"].endswith("rain")


def test_an_earlier_response(server: MockServer) -> None:
    first = post(server, **raw(asked("papaya"))).json()
    answer = post(server, input="Which word?", previous_response_id=first["id"], stop=[END]).json()
    check(answer, "completed")
    assert answer["previous_response_id"] == first["id"]
    assert answer["output"][0]["content"][0]["text"] == "papaya"


def test_a_stream_that_fails(tokenizer_folder: Path) -> None:
    """Its last event is `response.failed`, with the answer so far, and a code of OpenAI's."""
    options: Any = {"server": {"port": 0}, "seconds": 0.02}
    with serve_mock(tokenizer_folder, **options, fail_at=10) as server:
        last = events(server, input="a long text")[-1]
    EVENT.validate_python(last)
    OPENAI_EVENT.validate_python(last)
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
    check(last["response"], "failed")
    Response.model_validate(last["response"], strict=True)


@pytest.mark.parametrize("broken", ["take", "_usage"])
def test_an_unexpected_error_in_a_stream(
    server: MockServer, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it prevents what a failed response usually says."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("a secret")

    monkeypatch.setattr(*((blocks.BlockReader, "take") if broken == "take" else (reply, "_usage")), fail)
    last = events(server, **raw(asked("Hello.")))[-1]
    EVENT.validate_python(last)
    error = last["response"]["error"]
    assert last["type"] == "response.failed" and error["code"] == "server_error"
    assert "RuntimeError" in error["message"] and "secret" not in str(last)


@pytest.mark.parametrize("body", [{}, {"input": "a", "nothing": 1}, {"input": "a", "model": "unknown"}])
def test_errors(server: MockServer, body: dict[str, Any]) -> None:
    answer = post(server, **body)
    assert 400 <= answer.status_code < 500
    ERROR.validate_python(answer.json()["error"])


def test_the_schema_can_fail(server: MockServer) -> None:
    answer = post(server, **raw(REQUESTS["a call"])).json()
    RESPONSE.validate_python(answer)
    for name in ("completed_at", "presence_penalty", "service_tier", "safety_identifier", "max_tool_calls"):
        with pytest.raises(ValidationError):
            RESPONSE.validate_python({key: value for key, value in answer.items() if key != name})
    del answer["tools"][0]["description"]
    with pytest.raises(ValidationError):
        RESPONSE.validate_python(answer)
