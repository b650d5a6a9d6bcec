"""Before a request is admitted, nothing grows with it beyond a limit; and no client's work keeps the event
loop.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from jengine import InvalidArgument
from jengine.serving.calls import portions
from jengine.serving.calls.portions import Portions
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc import conversions
from jengine.serving.http import bodies
from jengine.serving.logs import MOST_CHARACTERS, RequestLog
from jengine.serving.requests.tracking import MAX_REQUEST_ID, TrackedRequest
from tests.mocks.mock_engine import MockEngine
from tests.serving.conftest import MakeServer, MockServer
from tests.serving.leaks import wait_until

LONG = "x" * (MAX_REQUEST_ID + 1)
MANY = 2049  # one more than /v1/embeddings takes


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests"


@pytest.fixture
def server(make_server: MakeServer, log: Path) -> Iterator[MockServer]:
    with make_server(
        server={"port": 0, "request_log": log, "max_answer_logprobs": 5000}, embedding_size=8
    ) as server:
        yield server
        server.wait_until_idle()


def post(server: MockServer, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = httpx.post(server.http + path, json=body, timeout=60)
    return answer.status_code, answer.json()


# --- ids and batches ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, field",
    [
        ("/completions", {"prompt": "a"}),
        ("/chat/completions", {"messages": []}),
        ("/embeddings", {"input": "a"}),
        ("/rerank", {"query": "a"}),
    ],
)
def test_ids_have_a_limit_over_http(server: MockServer, path: str, field: dict[str, Any]) -> None:
    status, answer = post(server, path, request_id=LONG, **field)
    assert (
        status == 400
        and answer["error"]["message"] == f"request_id: {len(LONG)} characters; at most {MAX_REQUEST_ID}"
    )
    assert answer["error"]["param"] == "request_id"


def test_ids_have_a_limit_over_grpc(server: MockServer) -> None:
    with server.stub() as stub:
        for call in (
            lambda: stub.Generate(pb.GenerateRequest(text="a", request_id=LONG)),
            lambda: list(stub.GenerateStream(pb.GenerateRequest(text="a", request_id=LONG))),
            lambda: stub.Chat(pb.ChatRequest(request_id=LONG)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert (
                refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                and "request_id" in refused.value.details()
            )
        longest = LONG[:MAX_REQUEST_ID]
        assert stub.Generate(pb.GenerateRequest(text="a", request_id=longest)).request_id == longest


@pytest.mark.parametrize("path, field", [("/completions", "prompt"), ("/embeddings", "input")])
def test_nothing_is_made_for_each_prompt_of_a_batch_that_is_rejected(
    server: MockServer, log: Path, path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    init = TrackedRequest.__init__

    def counting(self: TrackedRequest, method: str, request_id: str, metrics: Any) -> None:
        made.append(request_id)
        init(self, method, request_id, metrics)

    monkeypatch.setattr(TrackedRequest, "__init__", counting)
    status, answer = post(server, path, request_id="mine", **{field: ["a"] * MANY})
    assert status == 400 and answer["error"]["param"] == field
    assert made == ["mine"]
    status, answer = post(server, path, request_id="mine", **{field: ["a"] * 3})
    assert status == 200 and made[1:] == ["mine", "mine-1", "mine-2"]
    assert len(answer["choices" if field == "prompt" else "data"]) == 3


def test_fields_of_the_log_are_cut(server: MockServer, log: Path) -> None:
    assert post(server, "/completions", prompt="a", request_id="i" * MAX_REQUEST_ID)[0] == 200
    post(server, "/completions", prompt="a", request_id="i" * 60_000)

    def lines() -> list[str]:
        return [line for line in log.read_text().splitlines() if '"iii' in line]

    wait_until(lambda: len(lines()) == 2)
    assert max(map(len, lines())) < 1000


def test_any_field_of_the_log_is_cut(tmp_path: Path) -> None:
    lines = RequestLog(tmp_path / "log")
    lines.write({"error": "e" * 60_000, "tokens": 3})
    lines.close()
    entry = json.loads((tmp_path / "log").read_text())
    assert entry["error"] == "e" * MOST_CHARACTERS and entry["tokens"] == 3


# --- bodies ---------------------------------------------------------------------------------------


def test_names_of_fields_are_cut_in_messages(server: MockServer) -> None:
    """It was compared with the names of all parameters, and repeated twice."""
    answer = httpx.post(f"{server.http}/completions", json={"prompt": "a", "y" * 10**6: 1})
    assert answer.status_code == 400 and len(answer.content) < 2000
    assert len(str(InvalidArgument("f" * 10**6, "v" * 10**6, "l" * 10**6))) < 3000


@pytest.mark.parametrize(
    "field, size",
    [("user", bodies.MAX_VALUE), ("structured_outputs", bodies.MAX_DOCUMENT), ("stop", bodies.MAX_VALUE)],
)
def test_fields_have_a_size(server: MockServer, field: str, size: int) -> None:
    status, answer = post(server, "/completions", prompt="a", **{field: "x" * size})
    assert status == 400 and (
        answer["error"]["param"],
        f"at most {size} bytes" in answer["error"]["message"],
    ) == (field, True)


@pytest.mark.parametrize(
    "form, body",
    [
        (bodies.DETOKENIZE, {"tokens": ["a"] * 5000}),
        (bodies.TOKENIZE, {"tools": [1] * 5000}),
        (bodies.SCORE, {"text_1": "a", "text_2": [1] * 5000}),
        (bodies.RERANK, {"query": "a", "documents": [1] * 5000}),
    ],
)
def test_a_list_is_checked_up_to_its_first_invalid_item(
    form: bodies.BodyFields, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    class Counting:
        def __init__(self, validator: Any) -> None:
            self._validator = validator

        def validate_python(self, value: Any) -> Any:
            try:
                return self._validator.validate_python(value)
            except bodies.ValidationError as wrong:
                counts.append(wrong.error_count())
                raise

    monkeypatch.setattr(form, "_validator", Counting(form._validator))
    with pytest.raises(InvalidArgument):
        form.read(body)
    assert len(counts) == 1 and 1 <= counts[0] <= 10, "an item has as many errors as its union has types"


# --- the size of answers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, field",
    [
        ({"prompt": [7] * 240, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [[7] * 100] * 3, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [7] * 100, "prompt_logprobs": 0, "echo": True, "n": 50}, "prompt_logprobs"),
        ({"prompt": [7], "logprobs": 20, "max_tokens": 300}, "logprobs"),
    ],
)
def test_an_answer_that_would_hold_too_much_is_rejected(
    server: MockServer, body: dict[str, Any], field: str
) -> None:
    before = server.engine.steps
    status, answer = post(server, "/completions", **body)
    assert (
        status == 400
        and answer["error"]["param"] == field
        and "at most 5000 on this server (max_answer_logprobs)" in str(answer)
    )
    server.wait_until_idle()
    assert not server.engine.steps - before or isinstance(body["prompt"][0], list), (
        "rejected before it is queued"
    )
    with server.stub() as stub, pytest.raises(grpc.RpcError) as refused:
        stub.Generate(
            pb.GenerateRequest(text="a" * 900, sampling_params=pb.SamplingParams(prompt_logprobs=20))
        )
    assert "max_answer_logprobs" in refused.value.details()


def test_a_request_without_a_limit_of_tokens_gets_one_that_fits(server: MockServer) -> None:
    messages = [{"role": "user", "content": "a"}]
    status, answer = post(
        server, "/chat/completions", messages=messages, logprobs=True, top_logprobs=20, ignore_eos=True
    )
    assert status == 200 and answer["usage"]["completion_tokens"] == 5000 // 2 // 21
    status, answer = post(server, "/chat/completions", messages=messages, ignore_eos=True)
    assert status == 200 and answer["usage"]["completion_tokens"] > 900


def test_prompts_of_one_client_in_flight(make_server: MakeServer) -> None:
    """Busy, since it fits later; the room is free again when the answer has been sent."""
    slow = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[7] * 200),
        sampling_params=pb.SamplingParams(prompt_logprobs=20, max_tokens=500),
    )
    with make_server(server={"max_answer_logprobs": 5000}, seconds=0.01) as server, server.stub() as stub:
        first = stub.GenerateStream(slow)
        next(first)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Generate(slow)
        assert (
            refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            and "4200 log probabilities of prompts" in refused.value.details()
        )
        first.cancel()
        server.wait_until_idle()
        slow.sampling_params.max_tokens = 1
        assert len(stub.Generate(slow).prompt_logprobs) == 200


@pytest.mark.parametrize("stream", [False, True])
def test_large_answers_are_made_in_portions(
    make_server: MakeServer, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two portions the event loop runs: a probe has a turn for each. The text is that of a single
    portion.
    """
    body = {
        "prompt": [7] * 1000,
        "prompt_logprobs": 20,
        "echo": True,
        "logprobs": 20,
        "max_tokens": 1,
        "stream": stream,
        "request_id": "i",
    }
    turns: list[int] = []
    with make_server(server={"port": 0}) as server:

        async def count() -> None:
            async def probe() -> None:
                while True:
                    turns[-1] += 1
                    await asyncio.sleep(0)

            turns.append(0)
            nonlocal task
            task = asyncio.create_task(probe())

        task: asyncio.Task[None] | None = None
        original = Portions.next_turn
        waited: list[int] = []

        async def next_turn(self: Portions) -> None:
            await original(self)
            waited.append(turns[-1])

        monkeypatch.setattr(Portions, "next_turn", next_turn)
        server.run(count())
        small = httpx.post(f"{server.http}/completions", json=body, timeout=60).text
        server.run(_cancel(task))
        assert len(waited) >= 18  # two answers of 21,000 values; at most 2,000 at once
        assert len(set(waited)) == len(waited), "the probe ran in between"
        monkeypatch.setattr(portions, "PORTION", 10**9)
        whole = httpx.post(f"{server.http}/completions", json=body, timeout=60).text
        assert _without_time(small) == _without_time(whole)
        if not stream:
            [choice] = json.loads(whole)["choices"]
            assert len(choice["prompt_logprobs"]) == 1000 and len(choice["logprobs"]["tokens"]) == 1001
            assert choice["logprobs"]["top_logprobs"][0] is None and choice["prompt_logprobs"][0] is None


async def _cancel(task: Any) -> None:
    task.cancel()


def _without_time(text: str) -> str:
    return (
        text.partition('"created":')[0]
        if text.startswith("{")
        else "".join(part.partition(",")[2] for part in text.split('"created":'))
    )


def test_events_of_several_chunks_are_not_mixed(make_server: MakeServer) -> None:
    """Two prompts, each with an event larger than a chunk."""
    body = {"prompt": [[7] * 1000, [8] * 1000], "prompt_logprobs": 20, "max_tokens": 2, "stream": True}
    with make_server(server={"port": 0}) as server:
        lines = httpx.post(f"{server.http}/completions", json=body, timeout=60).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert {event["choices"][0]["index"] for event in events} == {0, 1}


# --- clients that go ------------------------------------------------------------------------------


def test_work_whose_client_has_gone_leaves_no_error(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The work fails after the client has gone, so its error is never read."""
    entered, leave = threading.Event(), threading.Event()
    to_messages = conversions.to_messages

    def held(messages: Any) -> Any:
        entered.set()
        assert leave.wait(30)
        return to_messages(messages)

    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content="x" * 20_000, tool_calls_json="{")]
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        caplog.at_level(logging.ERROR),
        make_server() as server,
        server.stub() as stub,
    ):
        patch.setattr(conversions, "to_messages", held)
        call = stub.Chat.future(request)
        assert entered.wait(30)
        call.cancel()
        server.run(asyncio.sleep(0.05))
        leave.set()
        server.run(asyncio.sleep(0.05))
        gc.collect()
        server.run(asyncio.sleep(0))
    assert "never retrieved" not in caplog.text


def test_a_client_that_goes_while_its_answer_is_sent(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC used to log each with a traceback. The answer is too large for one frame."""
    with pytest.MonkeyPatch.context() as patch, make_server() as server:
        patch.setattr(MockEngine, "do", lambda engine, operation: "x" * 2**24)
        for wait in range(40):
            with server.stub() as stub:
                stub.GetLoad(pb.GetLoadRequest())
                call = stub.Do.future(pb.DoRequest(operation="ListLoras"))
                server.run(asyncio.sleep(0.001 * (wait % 20)))
                call.cancel()
    assert not [record for record in caplog.records if record.name.startswith("grpc")]


# --- connections ----------------------------------------------------------------------------------


def test_web_pages_under_domain_names_are_rejected_without_keys(server: MockServer) -> None:
    """DNS rebinding: the page's domain resolves to this machine. Other clients may use any name."""
    body = {"prompt": "a", "max_tokens": 1}
    for host, origin, status in (
        ("evil.example", "http://evil.example", 421),
        ("evil.example:8000", "null", 421),
        ("localhost", "http://localhost", 200),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("jengine.default.svc", None, 200),
    ):
        headers = {"host": host} if origin is None else {"host": host, "origin": origin}
        assert httpx.post(f"{server.http}/completions", json=body, headers=headers).status_code == status, (
            host
        )


DESCRIPTORS = """
import resource
from jengine.serving.app import ENOUGH_DESCRIPTORS, allow_descriptors
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
allow_descriptors()
enough = ENOUGH_DESCRIPTORS if hard == -1 else min(ENOUGH_DESCRIPTORS, hard)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (enough, hard)
"""


def test_a_server_may_open_as_many_descriptors_as_it_is_allowed() -> None:
    subprocess.run([sys.executable, "-c", DESCRIPTORS], check=True)
