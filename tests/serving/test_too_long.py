"""Prompts that are too long for the model, as each API says it: agents then shorten their conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from jengine import InvalidArgument, PromptTooLong
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.processes.wire import Done, error_of, failed
from tests.serving.conftest import MockServer, serve_mock
from tests.text.conftest import byte_level, write

CONTEXT = 64
LONG = "a b " * 40  # a token for each byte, so that all of it is read
HUGE = "word " * 100_000  # its length in bytes tells
TOLD = rf"This model's maximum context length is {CONTEXT} tokens\. "
MESSAGES = [{"role": "user", "content": LONG}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockServer]:
    folder = write(byte_level(), tmp_path_factory.mktemp("too-long"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with serve_mock(folder, server={"port": 0}, max_model_len=CONTEXT, embedding_size=8) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/completions", {"prompt": LONG}, "prompt"),
        ("/completions", {"prompt": HUGE}, "prompt"),
        ("/completions", {"prompt": [7] * CONTEXT}, "prompt"),
        ("/completions", {"prompt": [[7], [7] * (CONTEXT + 1)]}, "prompt"),
        ("/chat/completions", {"messages": MESSAGES}, "messages"),
        ("/chat/completions", {"messages": [{"role": "user", "content": HUGE}]}, "messages"),
    ],
)
def test_openai_says_the_context_and_its_code(
    server: MockServer, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    answer = httpx.post(server.http + path, json={**body, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"], error["type"]) == (
        400,
        "context_length_exceeded",
        param,
        "invalid_request_error",
    )
    told = re.fullmatch(TOLD + rf"{re.escape(param)} resulted in (\d+) tokens( or more)?\.", error["message"])
    assert told and int(told[1]) >= CONTEXT


@pytest.mark.parametrize("given", [LONG, HUGE, [7] * (CONTEXT + 1)])
def test_embeddings(server: MockServer, given: Any) -> None:
    error = httpx.post(f"{server.http}/embeddings", json={"input": given}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert re.fullmatch(TOLD + r"input resulted in \d+ tokens( or more)?\.", error["message"])


@pytest.mark.parametrize("text", [LONG, HUGE])
@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_says_both_numbers(server: MockServer, text: str, stream: bool) -> None:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": text}], "stream": stream}
    answer = httpx.post(f"{server.http}/messages", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    told = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert told and int(told[1]) > int(told[2]) == CONTEXT - 1


def test_a_response_fails_in_its_stream(server: MockServer) -> None:
    answer = httpx.post(f"{server.http}/responses", json={"input": LONG, "store": False})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    answer = httpx.post(f"{server.http}/responses", json={"input": LONG, "store": False, "stream": True})
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]
    last = events[-1]["response"]
    assert last["status"] == "failed" and last["output"] == []
    assert last["error"] == {"code": "context_length_exceeded", "message": error["message"]}
    server.wait_until_idle()


def test_room_for_one_token_is_enough(server: MockServer) -> None:
    """More of them than fit are not refused: agents ask for as many as a model can ever write."""
    body = {"prompt": [7] * (CONTEXT - 1), "max_tokens": 32_000}
    [choice] = httpx.post(f"{server.http}/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "length"


def test_grpc_says_the_numbers(server: MockServer) -> None:
    with server.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Generate(pb.GenerateRequest(text=LONG))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    message = caught.value.details()
    assert message.startswith("prompt: ") and f"at most max_model_len - 1 = {CONTEXT - 1}" in message


def test_the_library_has_a_class_for_it(server: MockServer) -> None:
    for prompt, tokens in ([7] * 70, 70), (HUGE, None):
        with pytest.raises(PromptTooLong) as caught:
            server.llm.prepare(prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt})
        assert caught.value.context == CONTEXT
        assert caught.value.tokens == tokens or (tokens is None and caught.value.tokens >= CONTEXT)


def test_it_passes_between_processes() -> None:
    error = PromptTooLong("prompt", "a", "9 tokens; at most 7", 9, 8, or_more=True)
    with pytest.raises(PromptTooLong, match="at most 7") as caught:
        Done.refused(error).check()
    assert caught.value.counts == (9, 8, True)
    assert type(error_of(failed(error))) is InvalidArgument
