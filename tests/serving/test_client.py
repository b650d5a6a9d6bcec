"""The blocking and the asyncio client: with a server with a mock engine; and its retries, with a faulty
server.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import _channel

from jengine import InvalidArgument, SamplingParams, Tokenizer
from jengine.serving.calls.errors import Busy, Refusal, status_metadata
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client import AsyncClient, Client, Retries, ServedOutput, ServerError
from jengine.serving.grpc.client_messages import Attempts
from tests.serving.conftest import MakeServer


class Blocked:
    """An AsyncClient with Client's methods, in a separate event loop, so that the same tests cover both."""

    def __init__(self, address: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        try:
            self._client = self._runner.run(self._make(address, options))
        except BaseException:
            self._runner.close()
            raise

    async def _make(self, address: str, options: dict[str, Any]) -> AsyncClient:
        return AsyncClient(address, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            result = method(*arguments, **keywords)
            return self._runner.run(result) if inspect.iscoroutine(result) else self._follow(result)

        return call

    def _follow(self, outputs: Any) -> Iterator[ServedOutput]:
        try:
            while True:
                yield self._runner.run(anext(outputs))
        except StopAsyncIteration:
            return
        finally:
            self._runner.run(outputs.aclose())

    def __enter__(self) -> Blocked:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


KINDS: list[Any] = [Client, Blocked]


@pytest.fixture(params=KINDS, ids=["blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def client(kind: Any, make_server: MakeServer) -> Iterator[Client]:
    # slow enough that a stream has several messages
    with make_server(seconds=0.001) as server, kind(server.address) as made:
        yield made
        server.wait_until_idle()


# --- what it says and what it gets ----------------------------------------------------------------


def test_whole_and_streamed(client: Client, tokenizer_folder: Path) -> None:
    """The mock answers with the prompt's own tokens, over and over."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    prompt, params = "The quick brown fox", SamplingParams(max_tokens=9, logprobs=1, prompt_logprobs=0)
    ids = tokenizer.encode(prompt)
    expected = [ids[i % len(ids)] for i in range(9)]

    whole = client.generate(prompt, params, request_id="mine", timeout=20)
    answer = whole.outputs[0]
    assert (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason) == (
        expected,
        tokenizer.decode(expected),
        "length",
        None,
    )
    assert (whole.request_id, whole.model, whole.prompt, whole.finished) == ("mine", "mock", prompt, True)
    assert whole.usage == (len(ids), 9, 0) and answer.cumulative_logprob == pytest.approx(9 * -0.5)
    assert whole.metrics.first_token is not None and 0 <= whole.metrics.first_token <= (
        whole.metrics.finished or 0
    )
    assert answer.logprobs is not None and [list(position) for position in answer.logprobs] == [
        [token] for token in expected
    ]
    assert answer.logprobs[0][expected[0]].decoded_token == tokenizer.token_text(expected[0])
    assert (
        whole.prompt_logprobs is not None
        and whole.prompt_logprobs[0] is None
        and len(whole.prompt_logprobs) == len(ids)
    )

    *news, end = client.stream(prompt, params)
    assert [token for output in news for token in output.outputs[0].token_ids] == expected and len(news) > 1
    assert "".join(output.outputs[0].text for output in news) == answer.text
    assert [position for output in news for position in output.outputs[0].logprobs or ()] == answer.logprobs
    assert not any(output.finished for output in news) and end.finished and end.outputs[0].text == ""
    assert end.outputs[0].finish_reason == "length" and (end.usage, end.prompt_logprobs) == (
        whole.usage,
        whole.prompt_logprobs,
    )
    assert {output.request_id for output in news} == {end.request_id} != {""}


def test_several_completions_and_token_ids(client: Client) -> None:
    whole = client.generate([5, 6, 7], n=2, max_tokens=3)
    assert [answer.token_ids for answer in whole.outputs] == [
        [5, 6, 7],
        [6, 7, 5],
    ] and whole.prompt_token_ids == [5, 6, 7]
    *news, end = client.stream({"prompt_token_ids": [5, 6, 7]}, n=2, max_tokens=4, stop_token_ids=[5])
    tokens = {
        index: [t for output in news for c in output.outputs if c.index == index for t in c.token_ids]
        for index in (0, 1)
    }
    assert tokens == {0: [5], 1: [6, 7, 5]}
    assert [(c.finish_reason, c.stop_reason) for c in end.outputs] == [("stop", 5), ("stop", 5)]


def test_conversations(client: Client, tokenizer_folder: Path) -> None:
    messages = [
        {"role": "user", "content": ["a"]},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}], "thinking": True},
    ]
    tokenizer = Tokenizer.load(tokenizer_folder)
    text = "<s>user: a\n<s>assistant: b\n<s>assistant:"
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = client.chat(messages, max_tokens=len(ids), skip_special_tokens=False)
    assert whole.outputs[0].text == tokenizer.decode(ids, skip_special_tokens=False)
    *news, _ = client.chat_stream(messages, max_tokens=3, add_generation_prompt=False)
    assert [token for output in news for token in output.outputs[0].token_ids] == ids[:3]


def test_the_rest(client: Client, tokenizer_folder: Path) -> None:
    ids = client.tokenize("The quick")
    assert (
        ids == Tokenizer.load(tokenizer_folder).encode("The quick") and client.detokenize(ids) == "The quick"
    )
    model, load = client.model(), client.load()
    assert (model.name, model.max_model_len, model.has_chat_template) == ("mock", 1024, True)
    assert (load.running, load.waiting, load.free_pages) == (0, 0, load.pages)
    assert client.abort("nobody") is False


def test_a_stream_can_be_left_and_aborted(kind: Any, make_server: MakeServer) -> None:
    with make_server(seconds=0.005) as server, kind(server.address) as client:
        outputs = client.stream([1, 2, 3], max_tokens=1000)
        next(outputs)
        outputs.close()
        server.wait_until_idle()
        outputs = client.stream([1, 2, 3], max_tokens=1000, request_id="mine")
        next(outputs)
        assert client.abort("mine") is True
        *_, end = outputs
        assert (end.outputs[0].finish_reason, end.finished) == ("abort", True)
        timed = client.generate([1, 2, 3], max_tokens=1000, timeout=0.05)
        assert (timed.outputs[0].finish_reason, timed.outputs[0].stop_reason) == ("abort", "timeout")


def test_a_stream_can_be_interrupted_while_it_is_opened(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC counts a call before it starts the thread that serves the channel: Ctrl-C between the two would
    stall every later call.
    """
    start = _channel._run_channel_spin_thread

    def interrupted(state: object) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        start(state)

    with make_server(seconds=0.005) as server, Client(server.address) as client:
        monkeypatch.setattr(_channel, "_run_channel_spin_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(client.stream([1, 2, 3], max_tokens=1000))
        server.wait_until_idle()
        assert len(list(client.stream([1, 2, 3], max_tokens=2, timeout=30))[-1].outputs) == 1


def test_errors_name_the_field(client: Client) -> None:
    for wrong, field, value, limit in [
        # found here
        (lambda: client.generate([1], temperature=-1.0), "temperature", -1.0,
            "must be a finite number, at least 0"),
        # by the server
        (lambda: client.generate([1], stop_token_ids=[2, 501]), "stop_token_ids", [2, 501],
            "ids must be in [0, 501)"),
        (lambda: list(client.stream([1] * 1024)), "prompt", None,
            "1024 tokens; at most max_model_len - 1 = 1023"),
        (lambda: client.generate("\udcff"), "prompt", "\udcff", "cannot be sent: "),
        (lambda: client.tokenize("\udcff"), "text", "\udcff", "cannot be sent: "),
        (lambda: client.detokenize([-1]), "token_ids", [-1], "cannot be sent: "),
        (lambda: client.generate([-1]), "prompt_token_ids", [-1], "cannot be sent: "),
        (lambda: client.generate([1], SamplingParams(), n=2), "sampling_params", SamplingParams(),
            "cannot be combined with its fields"),
        (lambda: client.chat([{"role": "unknown", "content": ""}]), "messages[0].role", None,
            "must be one of system"),
        (lambda: client.chat([{"role": "user", "content": [1]}]), "messages[0]",
            {"role": "user", "content": [1]}, "cannot be sent: "),
        (lambda: client.generate([1], timeout=-1.0), "timeout_seconds", -1.0,
            "must be a finite number of seconds"),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgument) as refused:
            wrong()
        assert refused.value.field == field and limit in refused.value.limit
        assert value is None or refused.value.value == value
    with pytest.raises(InvalidArgument, match=r"temprature=1.0: .*; did you mean temperature\?"):
        client.generate([1], temprature=1.0)


# --- its patience ---------------------------------------------------------------------------------


class Faulty:
    """Answers with these in turn: a Refusal, or messages to stream before one."""

    def __init__(self, *script: list[Any]) -> None:
        self.script, self.times, self.keys = list(script), list[float](), list[Any]()

    def GenerateStream(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        self.times.append(time.monotonic())
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        for step in self.script.pop(0):
            if isinstance(step, Refusal):
                context.set_trailing_metadata(status_metadata(step))
                context.abort(step.code, step.message)
            yield step

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        list(self.GenerateStream(request, context))
        return pb.GenerateResponse(request_id="r")


STARTED = pb.GenerateStreamResponse(started=pb.Started(request_id="r"))
DELTA = pb.GenerateStreamResponse(delta=pb.Delta(text="x", token_ids=[1]))
FINISHED = pb.GenerateStreamResponse(
    finished=pb.Finished(endings=[pb.Ending(finish_reason=pb.FINISH_REASON_STOP)])
)
DOWN = Refusal(grpc.StatusCode.UNAVAILABLE, "gone")
FULL = Busy("full", 0.05)
TOO_LARGE = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large")


@contextmanager
def faulty(*script: list[Any]) -> Iterator[tuple[Faulty, str]]:
    service = Faulty(*script)
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        streams = {
            "Generate": grpc.unary_unary_rpc_method_handler,
            "GenerateStream": grpc.unary_stream_rpc_method_handler,
        }
        handlers = {
            name: handler(
                getattr(service, name),
                request_deserializer=pb.GenerateRequest.FromString,
                response_serializer=lambda response: response.SerializeToString(),
            )
            for name, handler in streams.items()
        }
        server.add_registered_method_handlers("jengine.v1.GenerateService", handlers)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield service, f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def test_tries_again_until_it_is_taken(kind: Any) -> None:
    script: list[list[Any]] = [[FULL], [STARTED, DOWN], [STARTED, DELTA, FINISHED], [FULL], [FULL], []]
    with faulty(*script) as (service, address), kind(address, api_key="secret") as client:
        assert [output.outputs[0].text for output in client.stream([1])] == ["x", ""]
        assert len(service.times) == 3 and service.times[1] - service.times[0] >= 0.05, (
            "earlier than it was told"
        )
        assert client.generate([1]).request_id == "r"
    assert service.script == [] and set(service.keys) == {"Bearer secret"}


@pytest.mark.parametrize(
    "script, code, told",
    [
        ([[TOO_LARGE]], "RESOURCE_EXHAUSTED", None),  # it will be too large next time
        # something has been read: it would come twice
        ([[STARTED, DELTA, FULL]], "RESOURCE_EXHAUSTED", 0.05),
        ([[STARTED, DELTA, DOWN]], "UNAVAILABLE", None),
        ([[FULL], [FULL], [FULL]], "RESOURCE_EXHAUSTED", 0.05),  # three attempts
        ([[Busy("full", 60.0)]], "RESOURCE_EXHAUSTED", 60.0),  # longer than it has time for
        ([[Refusal(grpc.StatusCode.UNAUTHENTICATED, "who?")]], "UNAUTHENTICATED", None),
    ],
)
def test_gives_up(kind: Any, script: list[list[Any]], code: str, told: float | None) -> None:
    with (
        faulty(*script) as (service, address),
        kind(address, retries=Retries(attempts=3, seconds=10.0)) as client,
    ):
        with pytest.raises(ServerError) as gave_up:
            list(client.stream([1]))
        assert (gave_up.value.code.name, gave_up.value.retry_seconds) == (code, told)
        assert service.script == [], "it was not asked as often as it should"


def test_pauses() -> None:
    def error(refusal: Refusal) -> Any:
        class Error(grpc.RpcError):
            code = staticmethod(lambda: refusal.code)
            trailing_metadata = staticmethod(
                lambda: (
                    ("other-bin", b"\xff"),
                    ("grpc-status-details-bin", b"\xff"),
                    *status_metadata(refusal),
                )
            )

        return Error()

    attempts = Attempts(Retries(attempts=9, seconds=1000.0))
    for low in (0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0):
        pause = attempts.pause(error(DOWN))
        assert pause is not None and low <= pause <= 1.25 * low
    assert attempts.pause(error(DOWN)) is None
    assert 7.0 <= (Attempts(Retries()).pause(error(Busy("full", 7.0))) or 0) <= 8.75
    assert Attempts(Retries(seconds=3.0)).pause(error(Busy("full", 7.0))) is None


def test_nobody_there(kind: Any) -> None:
    with kind("127.0.0.1:1", retries=Retries(attempts=2)) as client, pytest.raises(ServerError) as gave_up:
        client.model()
    assert gave_up.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_port_for_http(kind: Any) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"127.0.0.1:{server.server_port}"
            with kind(address, retries=Retries(attempts=1)) as client, pytest.raises(ServerError) as refused:
                client.model()
            assert "use its gRPC port" in str(refused.value)
        finally:
            server.shutdown()
            thread.join()


def test_an_address_is_no_url(kind: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"address='http://localhost:8000': must be HOST:PORT of gRPC"):
        kind("http://localhost:8000")


def test_files_that_are_not_there(kind: Any) -> None:
    with pytest.raises(InvalidArgument, match="tls_ca='/nowhere': cannot be read"):
        Client("127.0.0.1:1", tls_ca="/nowhere")
