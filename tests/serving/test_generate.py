"""The generate service over real sockets: what each RPC gives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import grpc
import pytest

import jengine
from jengine import BeamSearchParams, SamplingParams
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc import conversions
from jengine.serving.grpc.client import Client
from jengine.serving.grpc.client_messages import GenerateServiceStub, chat_request
from tests.serving.conftest import MakeServer, MockServer

TEXT = "The quick brown fox"


def kinds(events: Iterable[pb.GenerateStreamResponse]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


def deltas(events: Iterable[pb.GenerateStreamResponse], index: int = 0) -> list[pb.Delta]:
    return [
        event.delta for event in events if event.WhichOneof("event") == "delta" and event.delta.index == index
    ]


def test_generate(mock_server: MockServer, stub: GenerateServiceStub) -> None:
    answer = stub.Generate(
        pb.GenerateRequest(
            text=TEXT, sampling_params=pb.SamplingParams(max_tokens=7), request_id="mine", model="mock"
        )
    )
    ids = mock_server.llm.tokenizer.encode(TEXT)
    [completion] = answer.completions
    expected = (ids * 3)[:7]
    assert list(completion.token_ids) == expected
    assert completion.text == mock_server.llm.tokenizer.decode(expected)
    assert (
        completion.ending.finish_reason == pb.FINISH_REASON_LENGTH
        and completion.ending.WhichOneof("stop_reason") is None
    )
    assert (answer.request_id, answer.model) == ("mine", "mock")
    assert answer.usage == pb.Usage(prompt_tokens=len(ids), completion_tokens=7)
    assert 0 < answer.timings.first_token_seconds <= answer.timings.total_seconds < 10
    assert (
        not completion.logprobs
        and not answer.prompt_logprobs
        and not completion.ending.HasField("cumulative_logprob")
    )


def test_token_ids_are_taken_as_they_are(stub: GenerateServiceStub) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling_params=pb.SamplingParams(max_tokens=4)
    )
    assert list(stub.Generate(request).completions[0].token_ids) == [5, 6, 7, 5]


def test_the_models_defaults_where_nothing_is_set(make_server: MakeServer) -> None:
    """They apply to gRPC requests and to the client's, but not to requests with SamplingParams."""
    with make_server(defaults=SamplingParams(max_tokens=5, logprobs=1)) as server, server.stub() as stub:

        def lengths(params: pb.SamplingParams) -> tuple[int, int]:
            [completion] = stub.Generate(pb.GenerateRequest(text=TEXT, sampling_params=params)).completions
            return len(completion.token_ids), len(completion.logprobs)

        assert lengths(pb.SamplingParams()) == (5, 5)
        assert lengths(pb.SamplingParams(max_tokens=7, logprobs=0)) == (7, 7)
        with Client(server.address) as client:
            assert len(client.generate(TEXT).outputs[0].token_ids) == 5
            assert len(client.generate(TEXT, temperature=0.5).outputs[0].token_ids) == 5
            assert len(client.generate(TEXT, SamplingParams()).outputs[0].token_ids) == 16


def test_a_stream_adds_up(stub: GenerateServiceStub) -> None:
    request = pb.GenerateRequest(
        text=TEXT, sampling_params=pb.SamplingParams(max_tokens=40, logprobs=2, prompt_logprobs=1)
    )
    answer = stub.Generate(request)
    [whole] = answer.completions
    events = list(stub.GenerateStream(request))
    assert kinds(events) == ["started", *["delta"] * (len(events) - 2), "finished"] and len(events) > 2
    assert events[0].started.model == "mock" and len(events[0].started.request_id) == 32
    parts = deltas(events)
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == list(whole.token_ids)
    assert [entry for part in parts for entry in part.logprobs] == list(whole.logprobs) and len(
        whole.logprobs
    ) == 40
    finished = events[-1].finished
    assert list(finished.endings) == [whole.ending] and finished.usage == answer.usage
    assert (
        finished.prompt_logprobs == answer.prompt_logprobs
        and len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    )
    assert not answer.prompt_logprobs[0].entries and answer.prompt_logprobs[1].entries[0].decoded_token
    assert (
        whole.ending.cumulative_logprob == -0.5 * 40
        and len(whole.logprobs[0].entries) == 2
        and whole.logprobs[0].entries[0].rank == 1
    )


def test_several_completions(stub: GenerateServiceStub) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[70, 71, 72]), sampling_params=pb.SamplingParams(n=3, max_tokens=5)
    )
    answer = stub.Generate(request)
    assert [list(completion.token_ids) for completion in answer.completions] == [
        [70, 71, 72, 70, 71],
        [71, 72, 70, 71, 72],
        [72, 70, 71, 72, 70],
    ]
    events = list(stub.GenerateStream(request))
    assert (
        kinds(events).count("finished") == 1
        and events[-1].finished.usage.completion_tokens == answer.usage.completion_tokens == 15
    )
    for whole in answer.completions:
        assert "".join(part.text for part in deltas(events, whole.index)) == whole.text
        assert [token for part in deltas(events, whole.index) for token in part.token_ids] == list(
            whole.token_ids
        )
    assert [ending.index for ending in events[-1].finished.endings] == [0, 1, 2]


def test_beams(mock_server: MockServer, stub: GenerateServiceStub) -> None:
    params = pb.SamplingParams(use_beam_search=True, n=3, max_tokens=4, length_penalty=0.5)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70, 71, 72]), sampling_params=params)
    answer = stub.Generate(request)
    expected = [[70, 71, 72, 70], [71, 72, 70, 71], [72, 70, 71, 72]]
    assert [list(completion.token_ids) for completion in answer.completions] == expected
    assert [completion.ending.cumulative_logprob for completion in answer.completions] == [-2.0, -3.0, -4.0]
    assert answer.usage.completion_tokens == 12 and not answer.completions[0].logprobs
    events = list(stub.GenerateStream(request))
    assert kinds(events) == ["started", "delta", "delta", "delta", "finished"]
    assert [list(event.delta.token_ids) for event in events[1:-1]] == expected
    assert list(events[-1].finished.endings) == [completion.ending for completion in answer.completions]
    with Client(mock_server.address) as client:
        output = client.generate([70, 71, 72], BeamSearchParams(beam_width=2, max_tokens=4))
        assert [beam.token_ids for beam in output.outputs] == expected[:2]


@pytest.mark.parametrize(
    "params, reason, stop_text, stop_token_id",
    [
        ({"stop": ["brown"]}, pb.FINISH_REASON_STOP, "brown", None),
        ({"stop_token_ids": [72]}, pb.FINISH_REASON_STOP, None, 72),
        ({"max_tokens": 3}, pb.FINISH_REASON_LENGTH, None, None),
    ],
)
def test_endings(
    mock_server: MockServer,
    stub: GenerateServiceStub,
    params: dict[str, object],
    reason: int,
    stop_text: str | None,
    stop_token_id: int,
) -> None:
    ids = (
        [70, 71, 72]
        if "stop" not in params
        else mock_server.llm.tokenizer.encode(TEXT, add_special_tokens=False)
    )
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids), sampling_params=pb.SamplingParams(**{"max_tokens": 30, **params})
    )
    ending = stub.Generate(request).completions[0].ending
    assert ending.finish_reason == reason
    assert (ending.stop_text or None, ending.stop_token_id if ending.HasField("stop_token_id") else None) == (
        stop_text,
        stop_token_id,
    )
    assert list(stub.GenerateStream(request))[-1].finished.endings[0] == ending


def test_texts_too_long_for_the_event_loop(
    mock_server: MockServer, make_server: MakeServer, stub: GenerateServiceStub
) -> None:
    text = "naïve " * 5000
    ids = mock_server.llm.tokenizer.encode(text)
    assert list(stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids) == ids
    with make_server(max_model_len=len(ids) + 10, pages=len(ids)) as server, server.stub() as long_stub:
        answer = long_stub.Generate(
            pb.GenerateRequest(text=text, sampling_params=pb.SamplingParams(max_tokens=3))
        )
        assert list(answer.completions[0].token_ids) == ids[:3] and answer.usage.prompt_tokens == len(ids)


def test_chat(mock_server: MockServer, stub: GenerateServiceStub) -> None:
    messages = [pb.ChatMessage(role="system", content="Be brief."), pb.ChatMessage(role="user", content=TEXT)]
    request = pb.ChatRequest(messages=messages, sampling_params=pb.SamplingParams(max_tokens=100))
    answer = stub.Chat(request)
    prompt = mock_server.llm.tokenizer.encode(
        "<s>system: Be brief.\n<s>user: The quick brown fox\n<s>assistant:", add_special_tokens=False
    )
    assert list(
        answer.completions[0].token_ids[: len(prompt)]
    ) == prompt and answer.usage.prompt_tokens == len(prompt)
    events = list(stub.ChatStream(request))
    assert kinds(events)[0] == "started" and kinds(events)[-1] == "finished"
    assert "".join(part.text for part in deltas(events)) == answer.completions[0].text
    request.messages.append(pb.ChatMessage(role="assistant", content="The fox"))
    request.options.continue_final_message = True
    assert stub.Chat(request).usage.prompt_tokens < answer.usage.prompt_tokens + 10


def test_reasoning_of_earlier_answers_is_sent() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        messages = [{"role": "assistant", "content": "4", name: "2 and 2"}]
        request = chat_request(messages, None, {})
        sent = [{"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}]
        assert conversions.to_messages(request.messages) == sent


def test_messages_and_options_reach_the_template_as_they_were_sent() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        pb.ChatMessage(role="assistant", tool_calls_json=json.dumps(calls)),
        pb.ChatMessage(role="tool", content="", tool_call_id="1", name="f"),
    ]
    assert conversions.to_messages(messages) == [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "", "tool_call_id": "1", "name": "f"},
    ]
    options = pb.ChatOptions(
        add_generation_prompt=False, tools_json="[{}]", chat_template_kwargs_json='{"enable_thinking": false}'
    )
    assert conversions.to_options(options) == {
        "add_generation_prompt": False,
        "tools": [{}],
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_tokenize_and_detokenize(mock_server: MockServer, stub: GenerateServiceStub) -> None:
    tokenizer = mock_server.llm.tokenizer
    ids = list(stub.Tokenize(pb.TokenizeRequest(text="naïve 世界")).token_ids)
    assert ids == tokenizer.encode("naïve 世界") and ids[0] == 0
    assert (
        list(stub.Tokenize(pb.TokenizeRequest(text="naïve 世界", add_special_tokens=False)).token_ids)
        == ids[1:]
    )
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == "naïve 世界"
    assert (
        stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)).text
        == "<s>naïve 世界"
    )
    with pytest.raises(grpc.RpcError, match=r"token_ids=4294967295: ids must be in \[0, 501\)"):
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[2**32 - 1]))
    assert not stub.Tokenize(pb.TokenizeRequest(add_special_tokens=False)).token_ids


def test_get_model(mock_server: MockServer, stub: GenerateServiceStub) -> None:
    room = mock_server.engine.limits.sequence
    assert stub.GetModel(pb.GetModelRequest()) == pb.GetModelResponse(
        name="mock",
        max_model_len=room.max_model_len,
        max_num_seqs=32,
        vocab_size=501,
        dtype="float32",
        devices="1 mock",
        mesh={"tensor": 1},
        page_size=room.page_size,
        pages=room.pages,
        has_chat_template=True,
        jengine_version=jengine.__version__,
    )


def test_get_load(make_server: MakeServer) -> None:
    with make_server(max_num_seqs=1, seconds=0.02) as server, server.stub() as stub:
        assert stub.GetLoad(pb.GetLoadRequest()) == pb.GetLoadResponse(
            free_pages=1024, pages=1024, hit_pages={"full": 0}, programs_ready=41, programs=41,
            strategy="throughput",
            first_token_seconds=0.02,
        )  # fmt: skip
        streams = [
            stub.GenerateStream(
                pb.GenerateRequest(text=TEXT, sampling_params=pb.SamplingParams(max_tokens=500))
            )
            for _ in range(2)
        ]
        assert kinds(next(stream) for stream in streams) == ["started", "started"]
        next(streams[0])  # a delta: it runs
        until = time.monotonic() + 10
        # "started" was written before the engine has heard of it
        while (load := stub.GetLoad(pb.GetLoadRequest())).waiting == 0:
            assert load.running == 1 and time.monotonic() < until
        assert (
            (load.running, load.waiting) == (1, 1)
            and load.free_pages < load.pages
            and load.first_token_seconds == 0.04
        )
        for stream in streams:
            stream.cancel()
        server.wait_until_idle()


def test_defaults_are_those_of_the_library(mock_server: MockServer, stub: GenerateServiceStub) -> None:
    answer = stub.Generate(pb.GenerateRequest(text=TEXT))
    assert answer.usage.completion_tokens == SamplingParams().max_tokens
