"""The table of docs/service/endings.md: what each interface says of a request that ends without an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest

from jengine.core.updates import Ended
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client_messages import GenerateServiceStub
from tests.serving.conftest import MockServer, serve_mock

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
GENERATE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 9},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "hello", "max_output_tokens": 9},
}
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hello"},
    "/v1/score": {"text_1": "hello", "text_2": ["a", "b"]},
    "/v1/rerank": {"query": "hello", "documents": ["a", "b"]},
}
SHOW_ABORTS = ("/v1/completions", "/v1/chat/completions")  # those that were asked for
# finish_reason and stop_reason, the status over HTTP, and over gRPC where the answer does not show it
ENDINGS = [
    ("error", "no token is allowed", 500, grpc.StatusCode.INTERNAL),
    ("abort", "timeout", 504, grpc.StatusCode.DEADLINE_EXCEEDED),
    ("abort", "rejected", 504, grpc.StatusCode.DEADLINE_EXCEEDED),
    ("abort", "shutdown", 503, grpc.StatusCode.UNAVAILABLE),
    ("abort", "unloaded", 404, grpc.StatusCode.NOT_FOUND),
    ("abort", "paused", 500, None),
    ("abort", None, 500, None),
]
ending = pytest.mark.parametrize("reason, why, status, code", ENDINGS)


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[MockServer]:
    with serve_mock(tokenizer_folder, server={"port": 0}, embedding_size=8) as server:
        yield server


@pytest.fixture(autouse=True)
def ended(request: pytest.FixtureRequest, server: MockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ends every request like this, after two tokens."""
    case = getattr(request.node, "callspec", None)
    reason, why = ("error", "why") if case is None else (case.params["reason"], case.params["why"])
    answer = server.engine._update

    def update(request_id: str, sequence: Any) -> Any:
        pooled = sequence.request.pooling is not None
        return (
            Ended(request_id, reason, why)
            if pooled or sequence.generated == 2
            else answer(request_id, sequence)
        )

    monkeypatch.setattr(server.engine, "_update", update)


def post(server: MockServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.http[:-3]}{path}", json={"model": "mock", **body}, timeout=60)


@ending
@pytest.mark.parametrize("path", [*GENERATE, *OTHERS])
def test_whole_answers(
    path: str, reason: Any, why: str | None, status: int, code: Any, server: MockServer
) -> None:
    answer = post(server, path, {**GENERATE, **OTHERS}[path])
    if code is None and path in SHOW_ABORTS:
        assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "abort"
        return
    assert answer.status_code == status and (why or "without an answer") in answer.json()["error"]["message"]
    assert ("retry-after" in answer.headers) == (status == 503)
    server.wait_until_idle()


@ending
@pytest.mark.parametrize("path", GENERATE)
def test_streams(path: str, reason: Any, why: str | None, status: int, code: Any, server: MockServer) -> None:
    """No event looks like the end of an answer. The last one has the form that the API's clients know."""
    text = post(server, path, {**GENERATE[path], "stream": True}).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if path in SHOW_ABORTS:
        assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    ends = [choice["finish_reason"] for event in events for choice in event.get("choices", ())]
    if code is None and path in SHOW_ABORTS:
        assert ends[-1] == "abort"
        return
    assert not any(ends)
    kinds = [event.get("type") for event in events]
    assert not {"message_delta", "message_stop", "response.completed", "response.incomplete"} & {*kinds}
    last = events[-1]
    assert kinds[-1] == {"/v1/messages": "error", "/v1/responses": "response.failed"}.get(path)
    last = last["response"] if path == "/v1/responses" else last
    assert (why or "without an answer") in last["error"]["message"]
    if path == "/v1/responses":
        assert last["status"] == "failed"


@ending
def test_grpc(reason: Any, why: str | None, status: int, code: Any, server: MockServer) -> None:
    """jengine's own messages have the reason for an abort."""
    request = pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(max_tokens=9))
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hello")])
    with grpc.insecure_channel(server.address) as channel:
        stub = GenerateServiceStub(channel)
        if reason == "error":
            for call in (stub.Generate, stub.GenerateStream, stub.Chat, stub.ChatStream):
                with pytest.raises(grpc.RpcError, match="no token is allowed") as failed:
                    answer = call(chat if "Chat" in str(call._method) else request)
                    list(answer)
                assert failed.value.code() is code
            return
        for end in (
            stub.Generate(request).completions[0].ending,
            [*stub.GenerateStream(request)][-1].finished.endings[0],
        ):
            assert (end.finish_reason, end.stop_text) == (pb.FINISH_REASON_ABORT, why or "")


def test_clients_raise(server: MockServer) -> None:
    with openai.OpenAI(base_url=server.http, api_key="none", max_retries=0, timeout=60) as client:
        for path, create in (
            ("/v1/completions", client.completions.create),
            ("/v1/chat/completions", client.chat.completions.create),
            ("/v1/responses", client.responses.create),
        ):
            body: Any = {"model": "mock", **GENERATE[path]}
            with pytest.raises(openai.InternalServerError, match="why"):
                create(**body)
            if path != "/v1/responses":
                with pytest.raises(openai.APIError, match="why"):
                    list(create(**body, stream=True))
        with (
            pytest.raises(RuntimeError, match=r"response\.completed"),
            client.responses.stream(**body) as one,
        ):
            one.get_final_response()
        for several in ({"n": 3}, {"prompt": ["hello", "a", "b"]}):
            with pytest.raises(openai.InternalServerError):
                client.completions.create(**{"model": "mock", **GENERATE["/v1/completions"], **several})
    with anthropic.Anthropic(base_url=server.http[:-3], api_key="none", max_retries=0) as claude:
        body = {"model": "mock", **CHAT}
        with pytest.raises(anthropic.APIStatusError, match="why"):
            claude.messages.create(**body)
        with pytest.raises(anthropic.APIError, match="why"), claude.messages.stream(**body) as stream:
            stream.get_final_message()
    server.wait_until_idle()


def test_metrics_and_the_request_log(tokenizer_folder: Path, tmp_path: Path) -> None:
    log, options = tmp_path / "log", {"port": 0, "request_log": tmp_path / "log"}
    with serve_mock(tokenizer_folder, server=options) as server:
        server.engine._update = lambda name, _: Ended(name, "error", "why")  # type: ignore[method-assign]
        for path in GENERATE:
            assert post(server, path, GENERATE[path]).status_code == 500
        assert server.metrics.models["mock"].finished == {"error": len(GENERATE)}
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(entry["status"], entry["cause"], entry["finish_reasons"]) for entry in entries] == [
        ("INTERNAL", "error", ["error"])
    ] * len(GENERATE)


def test_an_engine_that_dies(tokenizer_folder: Path) -> None:
    for path in (*GENERATE, *OTHERS):
        with serve_mock(
            tokenizer_folder, server={"port": 0}, embedding_size=8, fail_at=0 if path in OTHERS else 2
        ) as server:
            if path in GENERATE:
                text = post(server, path, {**GENERATE[path], "stream": True}).text
                assert "the engine is not running" in text and '"stop"' not in text, text
            answer = post(server, path, {**GENERATE, **OTHERS}[path])
            assert answer.status_code == 503 and "retry-after" in answer.headers
