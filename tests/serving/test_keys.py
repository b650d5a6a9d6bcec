"""Data of a key: its request ids, priorities, limits, counts and log entries. Over sockets."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client_messages import GenerateServiceStub
from jengine.serving.guards.security import hash_line
from tests.serving.conftest import MakeServer, MockServer
from tests.serving.leaks import wait_until
from tests.serving.test_ends import SMALL_WINDOW, request_of
from tests.serving.test_generate import kinds
from tests.serving.test_refusals import generate, refused

ANNA, BERTA, RAW = "a" * 32, "b" * 32, "0123456789abcdef" * 4
LONG = pb.SamplingParams(max_tokens=900)
SHORT = pb.SamplingParams(max_tokens=5)


@pytest.fixture
def keys(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Options of a server for anna and berta; anna's key with these settings."""

    def write(*settings: str, **options: Any) -> dict[str, Any]:
        file = tmp_path / "keys"
        file.write_text(f"{hash_line(ANNA, 'anna', *settings)}\n{hash_line(BERTA, 'berta')}\n{RAW} raw\n")
        return {"api_keys": file, **options}

    return write


# --- request ids and aborts -------------------------------------------------------------------------


def test_request_ids_belong_to_their_key(make_server: MakeServer, keys: Any) -> None:
    with (
        make_server(server=keys(), seconds=0.005) as server,
        server.stub(ANNA) as anna,
        server.stub(BERTA) as berta,
    ):
        streams = [stub.GenerateStream(request_of("mine", sampling_params=LONG)) for stub in (anna, berta)]
        assert [next(stream).started.request_id for stream in streams] == [
            "mine",
            "mine",
        ], "two keys may use the same id"
        code, message, [details] = refused(lambda: anna.Generate(generate(request_id="mine")))
        assert code is grpc.StatusCode.ALREADY_EXISTS and details.resource_name == "mine"
        assert "anna" not in message and "\0" not in message
        assert berta.Abort(pb.AbortRequest(request_id="mine")).found
        assert kinds(streams[1])[-1] == "finished"
        assert not berta.Abort(pb.AbortRequest(request_id="mine")).found, (
            "the other key's is not found, as if there were none"
        )
        assert not berta.Abort(pb.AbortRequest(request_id="anna\0mine")).found, (
            "nor by the id that the engine knows"
        )
        assert kinds([next(streams[0])]) == ["delta"], "and goes on"
        assert anna.Abort(pb.AbortRequest(request_id="mine")).found
        assert anna.Generate(generate(request_id="x", sampling_params=SHORT)).request_id == "x"
        server.wait_until_idle()


# --- priorities --------------------------------------------------------------------------------------


def test_priorities_have_a_limit(make_server: MakeServer, keys: Any) -> None:
    with (
        make_server(server=keys("min_priority=-5")) as server,
        server.stub(ANNA) as anna,
        server.stub(BERTA) as berta,
    ):
        for stub, lowest in ((anna, -5), (berta, 0)):
            for priority in (lowest, 7):
                assert (
                    stub.Generate(generate(priority=priority, sampling_params=SHORT)).usage.completion_tokens
                    == 5
                )
            for call in (stub.Generate, stub.GenerateStream):
                code, message, _ = refused(lambda: call(generate(priority=lowest - 1)))  # noqa: B023 (called at once)
                assert code is grpc.StatusCode.PERMISSION_DENIED
                assert f"priority={lowest - 1}: at least {lowest}" in message and "min_priority" in message
        server.wait_until_idle()


def test_a_key_whose_requests_come_last(
    make_server: MakeServer, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests need not say so: those without a priority have its lowest."""
    options = keys("min_priority=5", port=0)
    with make_server(server=options) as server, server.stub(ANNA) as anna:
        http = httpx.Client(base_url=server.http, timeout=60, headers={"authorization": f"Bearer {ANNA}"})
        body, submit, priorities = {"model": "mock", "prompt": "x"}, server.llm.submit, list[int]()

        def noting(*arguments: Any, **options: Any) -> Any:
            priorities.append(options["priority"])
            return submit(*arguments, **options)

        monkeypatch.setattr(server.llm, "submit", noting)
        with http:
            assert anna.Generate(generate(sampling_params=SHORT)).usage.completion_tokens == 5
            assert http.post("/completions", json=body).status_code == 200
            assert http.post("/completions", json={**body, "priority": 6}).status_code == 200
            refusal = http.post("/completions", json={**body, "priority": 4})
            assert refusal.status_code == 403 and "priority=4: at least 5 with this key" in refusal.text
        assert priorities == [5, 5, 6]


def test_without_keys_every_priority_is_allowed(mock_server: MockServer) -> None:
    with mock_server.stub() as stub:
        assert stub.Generate(generate(priority=-(2**31), sampling_params=SHORT)).usage.completion_tokens == 5


# --- limits ------------------------------------------------------------------------------------------


def test_completions_are_counted(make_server: MakeServer, keys: Any) -> None:
    """n of them, not the streams; the key's own limit, not the server's."""
    with (
        make_server(server=keys("max_streams=4", max_streams_per_client=64), seconds=0.002) as server,
        server.stub(ANNA) as anna,
        server.stub(BERTA) as berta,
    ):
        stream = anna.GenerateStream(request_of(sampling_params=pb.SamplingParams(max_tokens=900, n=3)))
        next(stream)
        two = generate(sampling_params=pb.SamplingParams(n=2, max_tokens=5))
        code, message, [details] = refused(lambda: anna.Generate(two))
        assert (
            code is grpc.StatusCode.RESOURCE_EXHAUSTED
            and "the maximum is 4" in message
            and isinstance(details, RetryInfo)
        )
        assert anna.Generate(generate(sampling_params=SHORT)).usage.completion_tokens == 5, "one fits"
        assert len(berta.Generate(two).completions) == 2
        code, message, [details] = refused(
            lambda: anna.Generate(generate(sampling_params=pb.SamplingParams(n=5)))
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "at most 4" in message
        stream.cancel()
        server.wait_until_idle()
        assert len(anna.Generate(two).completions) == 2


@pytest.mark.parametrize("kind", ["whole", "stream", "left"])
def test_tokens_a_minute(make_server: MakeServer, keys: Any, kind: str) -> None:
    """Prompt and generated tokens, also for clients that disconnect before any output."""
    with make_server(server=keys("tokens_per_minute=40"), seconds=0.002) as server, server.stub(ANNA) as anna:
        request = generate(
            token_ids=pb.TokenIds(ids=[1] * 20),
            sampling_params=pb.SamplingParams(max_tokens=900 if kind == "left" else 30),
        )
        if kind == "left":
            call = anna.Generate.future(request)
            wait_until(lambda: server.engine.steps > 50)
            call.cancel()
            server.wait_until_idle()
        else:
            (anna.Generate if kind == "whole" else lambda sent: list(anna.GenerateStream(sent)))(request)
        code, message, [details] = refused(lambda: anna.Generate(request))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "40 tokens a minute" in message
        seconds = details.retry_delay.ToMilliseconds() / 1000
        debt = 11 if kind != "left" else None  # tokens, until there is one
        assert seconds > 15 if debt is None else debt * 60 / 40 - 10 < seconds <= debt * 60 / 40
        assert anna.Tokenize(pb.TokenizeRequest(text="x")).token_ids
        with server.stub(BERTA) as berta:
            assert berta.Generate(request).usage.prompt_tokens == 20
        server.wait_until_idle()


def test_running_requests_reserve_their_tokens(make_server: MakeServer, keys: Any) -> None:
    """Requests that start together may not use a minute's tokens several times over."""
    with make_server(server=keys("tokens_per_minute=100"), seconds=0.01) as server, server.stub(ANNA) as anna:
        request = generate(
            token_ids=pb.TokenIds(ids=[1] * 20),
            sampling_params=pb.SamplingParams(max_tokens=900, ignore_eos=True),
        )
        stream = anna.GenerateStream(request)
        next(stream)
        code, message, _ = refused(lambda: anna.Generate(generate(sampling_params=SHORT)))
        assert (
            code is grpc.StatusCode.RESOURCE_EXHAUSTED and "its running requests may use the rest" in message
        )
        stream.cancel()
        server.wait_until_idle()
        assert anna.Generate(generate(sampling_params=SHORT)).usage.completion_tokens == 5


def test_calls_of_every_kind_are_bounded(make_server: MakeServer) -> None:
    with make_server(server={"max_calls_per_client": 3, "max_streams_per_client": 1}) as server:
        with grpc.insecure_channel(server.address) as channel, server.stub() as other:
            watches = [HealthStub(channel).Watch(HealthCheckRequest()) for _ in range(3)]
            for watch in watches:
                next(watch)
            for call in (
                lambda: other.Abort(pb.AbortRequest(request_id="x")),
                lambda: other.GetLoad(pb.GetLoadRequest()),
                lambda: other.GetModel(pb.GetModelRequest()),
                lambda: other.Generate(generate()),
                lambda: HealthStub(channel).Watch(HealthCheckRequest()),
            ):
                code, message, [details] = refused(call)
                assert (
                    code is grpc.StatusCode.RESOURCE_EXHAUSTED
                    and "3 calls" in message
                    and details.retry_delay.ToMilliseconds() > 0
                )
            assert HealthStub(channel).Check(HealthCheckRequest()).status == HealthCheckResponse.SERVING
            watches[0].cancel()
            wait_until(lambda: _works(lambda: other.GetLoad(pb.GetLoadRequest())))
            for watch in watches:
                watch.cancel()
        assert server.metrics.rejections["client_calls", ""] >= 5
        server.wait_until_idle()


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
        return True
    except grpc.RpcError:
        return False


# --- the server's maxima -----------------------------------------------------------------------------


def test_maxima(make_server: MakeServer) -> None:
    with (
        make_server(server={"max_tokens_limit": 20, "max_request_seconds": 0.5}, seconds=0.1) as server,
        server.stub() as stub,
    ):
        code, message, [details] = refused(
            lambda: stub.Generate(generate(sampling_params=pb.SamplingParams(max_tokens=21)))
        )
        assert (
            code is grpc.StatusCode.INVALID_ARGUMENT
            and "at most 20" in message
            and "max_tokens_limit" in message
        )
        code, message, [details] = refused(lambda: stub.Generate(generate(timeout_seconds=0.6)))
        assert (
            code is grpc.StatusCode.INVALID_ARGUMENT
            and "at most 0.5" in message
            and "max_request_seconds" in message
        )
        assert details.field_violations[0].field == "timeout_seconds"
        ending = stub.Generate(generate(sampling_params=SHORT, timeout_seconds=0.0)).completions[0].ending
        assert ending.stop_text == "timeout", "a shorter one is the client's"
        ending = (
            stub.Generate(generate(sampling_params=pb.SamplingParams(max_tokens=20))).completions[0].ending
        )
        assert ending.stop_text == "timeout" and ending.finish_reason == pb.FINISH_REASON_ABORT, (
            "else it is the server's"
        )
    with make_server(server={"max_tokens_limit": 20}) as server, server.stub() as stub:
        unlimited = generate(sampling_params=pb.SamplingParams(max_tokens=2**31 - 1, ignore_eos=True))
        assert stub.Generate(unlimited).usage.completion_tokens == 20


def test_a_limit_below_the_default(make_server: MakeServer) -> None:
    """Requests that set no max_tokens get the server's: they are not refused for the default."""
    with (
        make_server(server={"port": 0, "max_tokens_limit": 3}) as server,
        server.stub() as stub,
        httpx.Client(base_url=server.http, timeout=60) as client,
    ):
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")])
        chat.sampling_params.ignore_eos = True
        plain = generate(sampling_params=pb.SamplingParams(ignore_eos=True))
        assert stub.Generate(plain).usage.completion_tokens == stub.Chat(chat).usage.completion_tokens == 3
        for path, body in (
            ("/completions", {"prompt": "x"}),
            ("/completions", {"prompt": "x", "use_beam_search": True, "n": 2}),
            ("/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            answer = client.post(path, json={"model": "mock", **body})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] <= 3 * body.get("n", 1)  # type: ignore[operator]


# --- what operators see ------------------------------------------------------------------------------


def test_the_request_log(make_server: MakeServer, keys: Any, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    prompt = pb.GenerateRequest(
        text="my secret prompt", request_id="one", sampling_params=pb.SamplingParams(max_tokens=5, n=2)
    )
    with make_server(server=keys(request_log=file), seconds=0.002) as server, server.stub(ANNA) as anna:
        assert len(anna.Generate(prompt).completions) == 2
        refused(lambda: anna.GenerateStream(generate(request_id="two", priority=-1)))
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="secret")], sampling_params=SHORT)
        list(anna.ChatStream(chat))
        left = anna.Generate.future(generate(request_id="four", sampling_params=LONG))
        wait_until(lambda: server.engine.load.running == 1)
        left.cancel()
        server.wait_until_idle()
        text = file.read_text
        wait_until(lambda: text().count("\n") == 4, text)
    one, two, three, four = map(json.loads, text().splitlines())
    assert "secret" not in text() and ANNA not in text()
    assert {entry["key"] for entry in (one, two, three, four)} == {"anna"}
    names = ("id", "method", "status", "cause", "prompt_tokens", "output_tokens", "finish_reasons")
    tokens = len(server.llm.tokenizer.encode(prompt.text))
    assert [one[name] for name in names] == ["one", "Generate", "OK", None, tokens, 10, ["length", "length"]]
    assert [two[name] for name in names] == [
        "two",
        "GenerateStream",
        "PERMISSION_DENIED",
        "priority",
        0,
        0,
        [],
    ]
    assert (three["method"], three["output_tokens"], len(three["id"])) == ("ChatStream", 5, 32)
    assert (four["id"], four["status"], four["finish_reasons"]) == ("four", "CANCELLED", ["abort"]) and four[
        "prompt_tokens"
    ]
    assert 0 <= one["queue_seconds"] <= one["first_token_seconds"] <= one["total_seconds"] < 60
    assert two["queue_seconds"] is two["first_token_seconds"] is None
    assert one["time"].endswith("+00:00")


def test_metrics_by_key_and_cause(make_server: MakeServer, keys: Any) -> None:
    with (
        make_server(server=keys("max_streams=1")) as server,
        server.stub(ANNA) as anna,
        server.stub(BERTA) as berta,
    ):
        anna.Generate(generate(token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling_params=SHORT))
        refused(lambda: anna.Generate(generate(sampling_params=pb.SamplingParams(n=2))))
        refused(lambda: berta.Generate(generate(priority=-1)))
        for wrong in ("w" * 32, RAW):
            with server.stub(wrong) as stranger:
                refused(lambda: stranger.Generate(generate()))
        with server.stub() as stranger:
            refused(lambda: stranger.Generate(generate()))
        server.wait_until_idle()
        metrics = server.metrics
        assert metrics.rejections == {
            ("invalid_argument", "anna"): 1, ("priority", "berta"): 1, ("wrong_key", ""): 2,
            ("missing_key", ""): 1,
        }  # fmt: skip
        use = metrics.by_key["anna"]
        assert (dict(use.requests), use.prompt_tokens, use.generation_tokens) == (
            {"OK": 1, "INVALID_ARGUMENT": 1},
            3,
            5,
        )
        assert metrics.by_key.keys() == {"anna", "berta"}
        [model] = metrics.models.values()
        queue, prompts = (
            model.histograms[name] for name in ("request_queue_time_seconds", "request_prompt_tokens")
        )
        assert sum(queue.counts) == sum(prompts.counts) == 1 and prompts.sum == 3


def test_wrong_keys_are_logged_sparsely(
    make_server: MakeServer, keys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jengine.serving"), make_server(server=keys()) as server:
        for wrong in ("w" * 32, RAW, "w" * 32):
            with server.stub(wrong) as stranger:
                code, *_ = refused(lambda: stranger.Generate(generate()))
                assert code is grpc.StatusCode.UNAUTHENTICATED
    messages = [record.getMessage() for record in caplog.records if record.name == "jengine.serving"]
    assert [message for message in messages if "rejected a call from ipv4:127.0.0.1" in message] == messages[
        :1
    ]
    [raw] = messages[1:]
    assert (
        "'raw' in the keys file is the key itself" in raw
        and "python -m jengine.serving.guards.security" in raw
    )
    assert RAW not in caplog.text and "w" * 32 not in caplog.text


def test_evictions_are_logged(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "jengine.serving"),
        make_server(
            server={"write_timeout": 0.2, "max_answer_logprobs": 10**9},
            seconds=0.001,
            max_model_len=2**20,
            pages=2**18,
        ) as server,
        grpc.insecure_channel(server.address, SMALL_WINDOW) as channel,
    ):
        stream = GenerateServiceStub(channel).GenerateStream(
            request_of(sampling_params=pb.SamplingParams(logprobs=20))
        )
        next(stream)
        wait_until(lambda: "slow reader" in caplog.text)
        stream.cancel()
    assert "ipv4:127.0.0.1" in caplog.text and "0.2 s" in caplog.text


def test_a_key_without_a_file(make_server: MakeServer, keys: Any) -> None:
    """Given as an option, alone or beside those of a file."""
    for server in ({"api_key": "sk-short"}, keys(api_key=("sk-other", "sk-short"))):
        with make_server(server=server) as mock:
            for key in ("sk-short", *([ANNA] if "api_keys" in server else [])):
                with mock.stub(key) as stub:
                    assert stub.Generate(generate(sampling_params=SHORT)).usage.completion_tokens == 5
            with mock.stub("sk-wrong") as stub:
                assert (
                    refused(lambda stub=stub: stub.Generate(generate(sampling_params=SHORT)))[0]
                    is grpc.StatusCode.UNAUTHENTICATED
                )
