"""The generate service over real sockets: what a request gives."""

from __future__ import annotations

from serving.generated.jengine.v1 import generate_pb2 as pb
from serving.generated.jengine.v1.generate_pb2_grpc import GenerateServiceStub
from tests.serving.conftest import MockServer

TEXT = "The quick brown fox"


def test_generate(mock_server: MockServer, stub: GenerateServiceStub) -> None:
    request = pb.GenerateRequest(text=TEXT, sampling_params=pb.SamplingParams(max_tokens=7), request_id="mine")
    answer = stub.Generate(request)
    ids = mock_server.llm.tokenizer.encode(TEXT)
    [completion] = answer.completions
    expected = (ids * 3)[:7]
    assert list(completion.token_ids) == expected
    assert completion.text == mock_server.llm.tokenizer.decode(expected)
    assert completion.ending.finish_reason == pb.FINISH_REASON_LENGTH and completion.ending.WhichOneof("stop_reason") is None
    assert (answer.request_id, answer.model) == ("mine", "mock")
    assert answer.usage == pb.Usage(prompt_tokens=len(ids), completion_tokens=7)
    assert 0 < answer.timings.first_token_seconds <= answer.timings.total_seconds < 10


def test_stream(mock_server: MockServer, stub: GenerateServiceStub) -> None:
    request = pb.GenerateRequest(text=TEXT, sampling_params=pb.SamplingParams(max_tokens=40, logprobs=2))
    whole = stub.Generate(request).completions[0]
    events = list(stub.GenerateStream(request))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"] and len(kinds) > 2
    deltas = [event.delta for event in events[1:-1]]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)
    assert [entry for delta in deltas for entry in delta.logprobs] == list(whole.logprobs) and len(whole.logprobs) == 40
    finished = events[-1].finished
    assert list(finished.endings) == [whole.ending] and finished.usage.completion_tokens == 40
