"""smg's worker service, called with the stub of smg's package."""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from jengine import InvalidArgument, SamplingParams, StructuredOutputs
from jengine.integrations.smg import added_services
from jengine.serving.config import ServerConfig
from tests.extras import of_extra
from tests.serving.conftest import MakeServer, MockServer

pb = of_extra("smg", "smg_grpc_proto.generated.vllm_engine_pb2")
common = of_extra("smg", "smg_grpc_proto.generated.common_pb2")
VllmEngineStub = of_extra("smg", "smg_grpc_proto.generated.vllm_engine_pb2_grpc").VllmEngineStub

from jengine.integrations.smg.messages import to_params, truncated  # noqa: E402
from jengine.integrations.smg.service import smg_service  # noqa: E402

IDS = [*range(5, 25)]


@pytest.fixture
def server(make_server: MakeServer) -> Iterator[MockServer]:
    with make_server(services=[smg_service], embedding_size=8) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture
def smg(server: MockServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.address) as channel:
        yield VllmEngineStub(channel)


def request(ids: list[int] = IDS, stream: bool = False, **params: Any) -> Any:
    return pb.GenerateRequest(
        request_id="r1",
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


def test_generate(smg: Any) -> None:
    whole = [answer.complete for answer in smg.Generate(request(max_tokens=4, n=2, logprobs=2))]
    assert [one.index for one in whole] == [0, 1]
    assert [list(one.output_ids) for one in whole] == [IDS[:4], IDS[1:5]]
    for one in whole:
        assert (one.finish_reason, one.prompt_tokens, one.completion_tokens) == ("length", 20, 4)
        scores = one.output_logprobs
        assert list(scores.token_ids) == list(one.output_ids) and len(scores.token_logprobs) == 4
        assert [len(top.values) for top in scores.top_logprobs] == [2] * 4
        assert [top.token_ids[0] for top in scores.top_logprobs] == list(one.output_ids)
    *chunks, last = smg.Generate(request(stream=True, max_tokens=6, prompt_logprobs=0, stop_token_ids=[8]))
    assert [token for chunk in chunks for token in chunk.chunk.token_ids] == IDS[:4]
    assert sum(chunk.chunk.completion_tokens for chunk in chunks) == 4
    scored = [chunk.chunk.HasField("input_logprobs") for chunk in chunks]
    assert scored == [True] + [False] * (len(chunks) - 1)
    prompt = chunks[0].chunk.input_logprobs
    assert list(prompt.token_ids) == IDS and not prompt.token_logprobs[0].HasField("value")
    assert all(one.HasField("value") for one in prompt.token_logprobs[1:])
    assert (last.complete.finish_reason, last.complete.matched_token_id) == ("stop", 8)
    assert list(last.complete.output_ids) == IDS[:4]
    [text] = smg.Generate(pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(max_tokens=2)))
    assert text.complete.prompt_tokens == 5
    [again] = smg.Generate(request(max_tokens=1))
    assert again.complete.cached_tokens == 16


def test_what_is_here(smg: Any, server: MockServer, tokenizer_folder: Path) -> None:
    assert smg.HealthCheck(pb.HealthCheckRequest()).healthy
    model = smg.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("mock", 1024, 501)
    assert model.is_generation and model.tokenizer_path == str(tokenizer_folder)
    facts = smg.GetServerInfo(pb.GetServerInfoRequest())
    assert (facts.max_num_seqs, facts.block_size, facts.data_parallel_size) == (32, 16, 1)
    [load] = smg.GetLoads(pb.GetLoadsRequest()).loads
    assert (load.num_total_reqs, load.max_total_num_tokens, load.token_usage) == (0, 1024 * 16, 0.0)
    *parts, last = smg.GetTokenizer(common.GetTokenizerRequest())
    archive = b"".join(part.data for part in (*parts, last))
    assert last.sha256 == hashlib.sha256(archive).hexdigest() and not any(part.sha256 for part in parts)
    names = zipfile.ZipFile(io.BytesIO(archive)).namelist()
    assert {"tokenizer.json", "chat_template.jinja"} <= {*names}
    embedded = smg.Embed(pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=IDS)))
    assert (embedded.prompt_tokens, embedded.embedding_dim, len(embedded.embedding)) == (20, 8, 8)
    assert smg.FlushCache(common.FlushCacheRequest()).success
    assert smg.Abort(pb.AbortRequest(request_ids=["r1", "none"])) == pb.AbortResponse()


def test_abort_ends_a_stream(make_server: MakeServer) -> None:
    with make_server(services=[smg_service], seconds=0.01) as server:
        with grpc.insecure_channel(server.address) as channel:
            smg = VllmEngineStub(channel)
            stream = smg.Generate(request(stream=True, max_tokens=900))
            assert next(stream).chunk.token_ids
            assert smg.GetLoads(pb.GetLoadsRequest()).loads[0].num_running_reqs == 1
            smg.Abort(pb.AbortRequest(request_ids=["r1"]))
            *_, last = stream
            assert last.complete.finish_reason == "abort" and len(last.complete.output_ids) < 900
        server.wait_until_idle()


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"media_refs": pb.MediaRefs()}, "INVALID_ARGUMENT", "media_refs='MediaRefs': must not be set"),
        (
            {"kv_transfer_params_json": "{}"},
            "INVALID_ARGUMENT",
            "only requests over HTTP can name another server",
        ),
        ({"data_parallel_rank": 1}, "INVALID_ARGUMENT", "must be 0: there is one"),
        ({"request_id": "x" * 1000}, "INVALID_ARGUMENT", "id"),
        ({"sampling_params": pb.SamplingParams(top_p=7)}, "INVALID_ARGUMENT", "sampling_params.top_p=7.0"),
        (
            {"sampling_params": pb.SamplingParams(structural_tag="{}")},
            "INVALID_ARGUMENT",
            "structural_tag='{}': must not be set",
        ),
        (
            {"sampling_params": pb.SamplingParams(truncate_prompt_tokens=0)},
            "INVALID_ARGUMENT",
            "must be -1 or at least 1",
        ),
        ({"tokenized": pb.TokenizedInput(input_ids=[1] * 2000)}, "INVALID_ARGUMENT", "at most max_model_len"),
    ],
)
def test_refused(smg: Any, fields: dict[str, Any], code: str, message: str) -> None:
    asked = request()
    asked.MergeFrom(pb.GenerateRequest(**fields))
    for name in fields:
        asked.ClearField(name)
    asked.MergeFrom(pb.GenerateRequest(**fields))
    with pytest.raises(grpc.RpcError) as refused:
        [*smg.Generate(asked)]
    assert refused.value.code().name == code and message in refused.value.details()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jengine.integrations.smg.service")
    monkeypatch.setitem(sys.modules, "smg_grpc_proto.generated", None)
    with pytest.raises(InvalidArgument, match="smg_api=True: needs pip install"):
        added_services(ServerConfig(smg_api=True))


def test_parameters() -> None:
    assert to_params(pb.SamplingParams()) == SamplingParams(
        max_tokens=None, skip_special_tokens=False, detokenize=False
    )
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "frequency_penalty": 0.5,
        "presence_penalty": 1.5, "repetition_penalty": 1.25, "max_tokens": 9, "min_tokens": 2,
        "stop_token_ids": [3], "ignore_eos": True, "n": 3, "logprobs": 4, "prompt_logprobs": 5, "seed": 6,
        "logit_bias": {7: 1.0}, "skip_special_tokens": True, "include_stop_str_in_output": True,
        "stop": ["end"],
    }  # fmt: skip
    own = {**fields, "stop_token_ids": (3,), "stop": ("end",)}
    assert to_params(pb.SamplingParams(**fields)) == SamplingParams(**own)
    for given, expected in (
        ({"json_schema": "{}"}, StructuredOutputs(json="{}")),
        ({"json_object": True}, StructuredOutputs(json={"type": "object"})),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, StructuredOutputs(choice=["a", "b"])),
        ({"regex": "a+"}, StructuredOutputs(regex="a+")),
    ):
        assert to_params(pb.SamplingParams(**given)).structured_outputs == expected
    assert to_params(pb.SamplingParams(json_object=False)).structured_outputs is None
    assert truncated([1, 2, 3], pb.SamplingParams(truncate_prompt_tokens=2), 9) == [2, 3]
    assert truncated([1, 2, 3], pb.SamplingParams(truncate_prompt_tokens=-1), 3) == [2, 3]
