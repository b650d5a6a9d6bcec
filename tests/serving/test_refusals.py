"""Rejected requests: statuses and details, before they reach the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status

from jengine import AsyncLLM
from jengine.serving.calls.errors import DETAILS_KEY, LONGEST_MESSAGE
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.client_messages import GenerateServiceStub
from tests.serving.conftest import TEMPLATE, MakeServer, MockServer, serve_mock
from tests.serving.test_ends import ENDLESS, request_of
from tests.serving.test_generate import TEXT, kinds
from tests.text.conftest import byte_level, write

SECRET = "my secret prompt"


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str, list[Any]]:
    """The status of a call: code, message, details."""
    with pytest.raises(grpc.RpcError) as error:
        answer = call()
        list(answer) if hasattr(answer, "cancel") else None
    details = []
    for key, value in error.value.trailing_metadata() or ():
        if key == DETAILS_KEY:
            status = Status.FromString(value)
            assert (status.code, status.message) == (error.value.code().value[0], error.value.details())
            for packed in status.details:
                for kind in (BadRequest(), RetryInfo(), ResourceInfo()):
                    if packed.Unpack(kind):
                        details.append(kind)
    return error.value.code(), error.value.details(), details


def generate(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": TEXT, **fields})


def chat(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(**{"messages": [pb.ChatMessage(role="user", content=TEXT)], **fields})


BAD = [
    (pb.GenerateRequest(), "prompt", "must not be empty"),
    (generate(token_ids=pb.TokenIds()), "prompt", "must not be empty"),
    (generate(token_ids=pb.TokenIds(ids=[501])), "prompt", "[0, 501)"),
    (generate(token_ids=pb.TokenIds(ids=[2**32 - 1])), "prompt", "[0, 501)"),
    (generate(token_ids=pb.TokenIds(ids=[1] * 1024)), "prompt", "max_model_len"),
    (generate(timeout_seconds=-1.0), "timeout_seconds", "at least 0"),
    (generate(timeout_seconds=float("nan")), "timeout_seconds", "finite"),
    (
        generate(sampling_params=pb.SamplingParams(temperature=-1.0)),
        "sampling_params.temperature",
        "temperature=-1.0",
    ),
    (
        generate(sampling_params=pb.SamplingParams(temperature=float("nan"))),
        "sampling_params.temperature",
        "finite",
    ),
    (generate(sampling_params=pb.SamplingParams(top_p=0.0)), "sampling_params.top_p", "(0, 1]"),
    (generate(sampling_params=pb.SamplingParams(max_tokens=0)), "sampling_params.max_tokens", "at least 1"),
    (generate(sampling_params=pb.SamplingParams(n=65)), "sampling_params.n", "64"),
    (
        generate(sampling_params=pb.SamplingParams(stop=[""])),
        "sampling_params.stop",
        "at least one character",
    ),
    (
        generate(sampling_params=pb.SamplingParams(stop_token_ids=[501])),
        "sampling_params.stop_token_ids",
        "[0, 501)",
    ),
    (
        generate(sampling_params=pb.SamplingParams(logit_bias={600: 1.0})),
        "sampling_params.logit_bias",
        "[0, 501)",
    ),
    (
        generate(sampling_params=pb.SamplingParams(structured_outputs=pb.StructuredOutputs())),
        "sampling_params.structured_outputs",
        "one",
    ),
    (
        generate(sampling_params=pb.SamplingParams(structured_outputs=pb.StructuredOutputs(json="{"))),
        "sampling_params.structured",
        "",
    ),
    (
        generate(sampling_params=pb.SamplingParams(structured_outputs=pb.StructuredOutputs(regex="("))),
        "sampling_params.structured",
        "",
    ),
    (
        generate(sampling_params=pb.SamplingParams(structured_outputs=pb.StructuredOutputs(grammar="x"))),
        "sampling_params.structured",
        "",
    ),
    (generate(sampling_params=pb.SamplingParams(stop=["x"] * 257)), "sampling_params.stop", "256"),
    (
        generate(sampling_params=pb.SamplingParams(bad_words=["x" * 10_001])),
        "sampling_params.bad_words",
        "10000 characters",
    ),
    (
        generate(
            sampling_params=pb.SamplingParams(structured_outputs=pb.StructuredOutputs(regex="x" * 100_001))
        ),
        "sampling_params.structured_outputs",
        "at most 100000",
    ),
    (chat(messages=[]), "messages", "at least one message"),
    (chat(messages=[pb.ChatMessage(role="king", content="")]), "messages[0].role", "user"),
    (chat(messages=[pb.ChatMessage(role="user")]), "messages[0].content", "missing"),
    (
        chat(messages=[pb.ChatMessage(role="assistant", tool_calls_json="{")]),
        "messages[0].tool_calls_json",
        "array",
    ),
    (chat(options=pb.ChatOptions(tools_json="7")), "options.tools_json", "array"),
    (chat(options=pb.ChatOptions(tools_json="[{}]")), "options.tools_json", "function"),
    (chat(options=pb.ChatOptions(tools_json="[" * 100_000)), "options.tools_json", "array"),
    (
        chat(options=pb.ChatOptions(chat_template_kwargs_json="[]")),
        "options.chat_template_kwargs_json",
        "object",
    ),
    (
        chat(options=pb.ChatOptions(chat_template="{{ 1 }}")),
        "options.chat_template",
        "does not accept templates",
    ),
    (
        chat(options=pb.ChatOptions(add_generation_prompt=True, continue_final_message=True)),
        "options.add_generation_prompt",
        "continue_final_message",
    ),
]


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[MockServer]:
    with serve_mock(tokenizer_folder) as server:
        yield server
        server.wait_until_idle()


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize(
    "request_, field, text", BAD, ids=[f"{field}-{i}" for i, (_, field, _) in enumerate(BAD)]
)
def test_bad_fields_are_named(server: MockServer, request_: Any, field: str, text: str) -> None:
    with server.stub() as stub:
        whole, stream = (
            (stub.Chat, stub.ChatStream)
            if isinstance(request_, pb.ChatRequest)
            else (stub.Generate, stub.GenerateStream)
        )
        code, message, [details] = refused(lambda: whole(request_))
        assert (
            code is grpc.StatusCode.INVALID_ARGUMENT and text in message and len(message) <= LONGEST_MESSAGE
        )
        [violation] = details.field_violations
        assert (
            violation.field.startswith(field)
            and violation.description == message
            and violation.field in message
        )
        assert TEXT not in message
        assert refused(lambda: stream(request_)) == (code, message, [details]), "before it has started"
    assert server.engine.steps == 0


def test_another_model(server: MockServer) -> None:
    with server.stub() as stub:
        for call in (
            lambda: stub.Generate(generate(model="gpt")),
            lambda: stub.GenerateStream(generate(model="gpt")),
            lambda: stub.Chat(chat(model="gpt")),
            lambda: stub.Tokenize(pb.TokenizeRequest(model="gpt")),
            lambda: stub.Detokenize(pb.DetokenizeRequest(model="gpt")),
        ):
            code, message, [details] = refused(call)
            assert code is grpc.StatusCode.NOT_FOUND and "mock" in message
            assert (details.resource_type, details.resource_name) == ("model", "gpt")


def test_an_id_in_use(make_server: MakeServer) -> None:
    with make_server(seconds=0.005) as server, server.stub() as stub:
        stream = stub.GenerateStream(request_of("mine", sampling_params=pb.SamplingParams(max_tokens=500)))
        next(stream)
        code, _, [details] = refused(lambda: stub.Generate(generate(request_id="mine")))
        assert code is grpc.StatusCode.ALREADY_EXISTS and details.resource_name == "mine"
        assert kinds([next(stream)]) == ["delta"], "the one who has it goes on"
        stream.cancel()
        server.wait_until_idle()
        stub.Generate(generate(request_id="mine"))


def test_no_chat_template(tmp_path: Path) -> None:
    with (
        serve_mock(write(byte_level(), tmp_path), server={"client_chat_templates": True}) as server,
        server.stub() as stub,
    ):
        code, message, details = refused(lambda: stub.Chat(chat()))
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "chat template" in message and not details
        assert str(tmp_path) not in message, "folders are the server's own business"
        answer = stub.Chat(chat(options=pb.ChatOptions(chat_template=TEMPLATE)))
        assert answer.usage.prompt_tokens > 4


def test_a_full_queue(make_server: MakeServer) -> None:
    with (
        make_server(server={"max_waiting": 2}, max_num_seqs=2, seconds=0.002) as server,
        server.stub() as stub,
    ):
        running = [
            stub.GenerateStream(request_of(sampling_params=pb.SamplingParams(max_tokens=400)))
            for _ in range(4)
        ]
        assert kinds(next(stream) for stream in running) == ["started"] * 4
        wait_for(lambda: server.engine.load[:2] == (2, 2))
        code, message, [details] = refused(lambda: stub.Generate(generate()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "queue is full" in message
        assert 0.1 <= details.retry_delay.ToMilliseconds() / 1000 <= 30
        assert server.engine.load[:2] == (2, 2)
        running[0].cancel()
        wait_for(lambda: server.engine.load[:2] == (2, 1))
        assert stub.Generate(generate()).usage.completion_tokens == 16, "one place is free"
        code, message, [details] = refused(
            lambda: stub.Generate(generate(sampling_params=pb.SamplingParams(n=5)))
        )
        assert (
            code is grpc.StatusCode.INVALID_ARGUMENT
            and details.field_violations[0].field == "sampling_params.n"
        ), "there is no use in waiting"
        for stream in running:
            stream.cancel()
        server.wait_until_idle()


def test_a_client_of_many_streams(make_server: MakeServer) -> None:
    with make_server(server={"max_streams_per_client": 3}, seconds=0.002) as server, server.stub() as stub:
        streams = [
            stub.GenerateStream(request_of(sampling_params=pb.SamplingParams(max_tokens=900)))
            for _ in range(3)
        ]
        for stream in streams:
            next(stream)
        wait_for(lambda: server.engine.load.running == 3)
        with server.stub() as other:  # another connection of the same client
            code, message, [details] = refused(lambda: other.Generate(generate()))
            assert (
                code is grpc.StatusCode.RESOURCE_EXHAUSTED
                and "streams" in message
                and isinstance(details, RetryInfo)
            )
            assert other.GetLoad(pb.GetLoadRequest()).running == 3, (
                "who only asks how things are is never refused"
            )
        for stream in streams:
            stream.cancel()
        server.wait_until_idle()
        assert stub.Generate(generate(), wait_for_ready=True).usage.completion_tokens == 16


def test_a_message_that_is_too_large(make_server: MakeServer) -> None:
    with make_server(server={"max_message_bytes": 2000}) as server, server.stub() as stub:
        code, *_ = refused(lambda: stub.Generate(generate(text="x" * 3000)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Generate(generate()).usage.completion_tokens == 16


def test_a_dead_engine(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    with make_server(fail_at=5) as server, server.stub() as stub:
        streams = [
            stub.GenerateStream(request_of(sampling_params=pb.SamplingParams(max_tokens=900)))
            for _ in range(8)
        ]
        for stream in streams:
            code, message, [details] = refused(lambda: stream)  # noqa: B023 (called at once)
            assert (
                code is grpc.StatusCode.UNAVAILABLE
                and details.retry_delay.ToMilliseconds() > 0
                and "mock" not in message
            )
        for call in (lambda: stub.Generate(ENDLESS), lambda: stub.GenerateStream(ENDLESS)):
            code, _, [details] = refused(call)
            assert code is grpc.StatusCode.UNAVAILABLE and details.retry_delay.ToMilliseconds() > 0
        assert stub.GetModel(pb.GetModelRequest()).name == "mock", "known without an engine"
    assert not [
        record
        for record in caplog.records
        if record.levelno >= logging.ERROR and record.name.startswith("grpc")
    ]


def test_faults_tell_no_prompts(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: AsyncLLM, prompt: Any, *_: Any, **__: Any) -> None:
        raise LookupError(f"not in the table: {prompt}")

    caplog.set_level(logging.DEBUG)
    with make_server() as server, server.stub() as stub:
        stub.Generate(generate(text=SECRET))
        monkeypatch.setattr(AsyncLLM, "prepare", fail)
        code, message, _ = refused(lambda: stub.Generate(generate(text=SECRET)))
        assert code is grpc.StatusCode.INTERNAL and "LookupError" in message and SECRET not in message
    assert "LookupError" in caplog.text and "test_refusals.py" in caplog.text and SECRET not in caplog.text


def test_nothing_is_logged_of_ordinary_requests(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "jengine.serving")
    with make_server() as server, server.stub() as stub:
        answer = stub.Generate(generate(text=SECRET))
        list(stub.GenerateStream(generate(text=SECRET)))
        refused(lambda: stub.Generate(generate(text=SECRET, timeout_seconds=-1.0)))
    assert SECRET not in caplog.text and answer.completions[0].text not in caplog.text


def test_ids_that_clients_choose_do_not_meet_those_of_others(make_server: MakeServer) -> None:
    """Clients that use the names that AsyncLLM would generate next do not block others."""
    with make_server(seconds=0.002) as server:

        async def main() -> None:
            async with grpc.aio.insecure_channel(server.address) as channel:
                stub = GenerateServiceStub(channel)
                taken = [
                    stub.GenerateStream(
                        request_of(f"request-{i}", sampling_params=pb.SamplingParams(max_tokens=500))
                    )
                    for i in range(20)
                ]
                for stream in taken:
                    await stream.read()
                await asyncio.gather(*[stub.Generate(generate()) for _ in range(10)])
                for stream in taken:
                    stream.cancel()

        asyncio.run(main())
        server.wait_until_idle()
