"""Dynamo's engine protocol: with its package where that is installed, and what needs none of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from jengine import LLM, InvalidArgument, SamplingParams, StructuredOutputs
from jengine.integrations.dynamo.requests import params_of
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.extras import of_extra

DEFAULTS = SamplingParams(temperature=0.75, top_k=3)
IDS = [*range(5, 55)]
REQUEST = {"token_ids": IDS, "sampling_options": {"temperature": 0.0}, "stop_conditions": {"max_tokens": 6}}


def test_parameters() -> None:
    assert params_of({}, DEFAULTS) == DEFAULTS.clone(max_tokens=None, detokenize=False)
    asked = {
        "sampling_options": {
            "temperature": 0.5, "top_p": 0.5, "top_k": -1, "min_p": 0.25, "presence_penalty": 1.0,
            "frequency_penalty": 1.5, "repetition_penalty": 1.25, "seed": 7, "n": 1, "best_of": None,
            "logit_bias": {3: 1.0}, "guided_decoding": {"regex": "a+", "json": None, "backend": None},
        },
        "stop_conditions": {
            "max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop": ["x"],
            "stop_token_ids": [5], "stop_token_ids_hidden": [4, 5],
        },
        "output_options": {"logprobs": 2, "prompt_logprobs": 1, "skip_special_tokens": True},
    }  # fmt: skip
    assert params_of(asked, DEFAULTS) == SamplingParams(
        temperature=0.5, top_p=0.5, top_k=-1, min_p=0.25, presence_penalty=1.0, frequency_penalty=1.5,
        repetition_penalty=1.25, seed=7, logit_bias={3: 1.0}, max_tokens=9,
        structured_outputs=StructuredOutputs(regex="a+"), min_tokens=2, ignore_eos=True,
        stop_token_ids=(4, 5), logprobs=2, prompt_logprobs=1, detokenize=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sampling_options": {"n": 2}}, "sampling_options.n=2: is not supported by this worker"),
        ({"sampling_options": {"length_penalty": 2.0}}, "length_penalty=2.0: is not supported"),
        ({"sampling_options": {"top_p": 3}}, "top_p=3: must be"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": {}}}}, "guided_decoding.structural_tag"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "max_thinking_tokens=5: is not supported"),
        ({"multi_modal_data": {"image": []}}, "multi_modal_data='dict': must not be set"),
        ({"prefill_result": {"a": 1}}, "prefill_result"),
    ],
)
def test_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        params_of(asked, DEFAULTS)
    assert message in str(refused.value)


class Context:
    """Dynamo's, of a request."""

    def __init__(self, name: str) -> None:
        self.name = name

    def id(self) -> str:
        return self.name


class Snapshots:
    """Dynamo's SnapshotPublisher."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Any]] = []

    def publish(self, rank: int, snapshot: Any) -> None:
        self.seen.append((rank, snapshot))


@pytest.fixture(scope="module")
def expected() -> Iterator[list[int]]:
    """The library's answer to REQUEST."""
    with on_demand(), LLM("demo", progress=False, max_model_len=128, **SMALL) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6)
        [output] = llm.generate({"prompt_token_ids": IDS}, params, use_tqdm=False)
        yield output.outputs[0].token_ids


def test_an_engine_of_dynamo(expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through its life, as Dynamo's Worker leads it."""
    of_extra("dynamo", "dynamo.common.backend")
    zmq = of_extra("dynamo", "zmq.asyncio")
    from dynamo.common.backend import LLMEngine
    from dynamo.llm.exceptions import EngineShutdown
    from dynamo.llm.exceptions import InvalidArgument as Refused
    from zmq import SUB, SUBSCRIBE

    from jengine.integrations.dynamo.worker import JengineEngine

    async def chunks(engine: Any, request: dict[str, Any], name: str) -> list[dict[str, Any]]:
        return [one async for one in engine.generate(request, Context(name))]

    async def live() -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
        engine, worker = await JengineEngine.from_args(
            [
                "demo",
                "--served-model-name=tiny",
                "--max-model-len=128",
                "--endpoint-types=completions",
                *flags,
            ]
        )
        assert isinstance(engine, LLMEngine) and worker.served_model_name == "tiny"
        with pytest.raises(EngineShutdown):
            await chunks(engine, REQUEST, "early")
        with on_demand():
            facts = await engine.start(7)
        assert (facts.served_model_name, facts.llm.context_length) == ("tiny", 128)
        assert (facts.llm.kv_cache_block_size, facts.llm.max_num_seqs) == (16, 8)
        [source] = await engine.kv_event_sources()
        context = zmq.Context()
        events = context.socket(SUB)
        events.setsockopt(SUBSCRIBE, source.topic.encode())
        events.connect(source.endpoint)
        snapshots = Snapshots()
        await asyncio.to_thread(engine.attach_snapshot_publisher, snapshots)

        *parts, last = await chunks(engine, REQUEST, "a")
        assert [token for part in (*parts, last) for token in part["token_ids"]] == expected
        assert all("finish_reason" not in part for part in parts) and last["finish_reason"] == "length"
        assert last["completion_usage"]["total_tokens"] == len(IDS) + 6
        scored = await chunks(
            engine, {**REQUEST, "output_options": {"logprobs": 1, "prompt_logprobs": 0}}, "b"
        )
        for part in scored:
            assert len(part["log_probs"]) == len(part["top_logprobs"]) == len(part["token_ids"])
        assert len(scored[-1]["engine_data"]["prompt_logprobs"]) == len(IDS)
        with pytest.raises(Refused, match=r"sampling_options\.n=2"):
            await chunks(engine, {**REQUEST, "sampling_options": {"n": 2}}, "c")

        stream = engine.generate(
            {**REQUEST, "stop_conditions": {"max_tokens": 70, "ignore_eos": True}}, Context("d")
        )
        await anext(stream)
        await engine.abort(Context("d"))
        assert [one async for one in stream][-1]["finish_reason"] == "cancelled"

        assert (await engine.engine_control("reset_prefix_cache", {}))["status"] == "ok"
        assert (await engine.engine_control("pause", {"mode": "nonsense"}))["status"] == "error"
        assert (await engine.engine_control("nonsense", {}))["status"] == "error"
        while not await engine.is_quiescent():
            await asyncio.sleep(0.01)
        queued: Any = SimpleNamespace(_llm=SimpleNamespace(load=SimpleNamespace(running=0, waiting=1)))
        assert not await JengineEngine.is_quiescent(queued)
        payload = await engine.health_check_payload()
        assert payload is not None and payload["token_ids"]
        kinds: list[str] = []
        while "AllBlocksCleared" not in kinds:
            *_, packed = await asyncio.wait_for(events.recv_multipart(), 60)
            kinds += [event["type"] for event in msgspec.msgpack.decode(packed)[1]]
        while not snapshots.seen:
            await asyncio.sleep(0.01)
        assert snapshots.seen[0][0] == 0 and snapshots.seen[0][1].kv_total_blocks == 119
        monkeypatch.setattr("jengine.integrations.dynamo.worker.DRAIN_SECONDS", 0.0)
        await engine.engine_control("pause", {"mode": "keep"})  # it would end
        waiting = asyncio.ensure_future(chunks(engine, REQUEST, "d"))
        await asyncio.sleep(0)
        draining = asyncio.ensure_future(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineShutdown):
            await chunks(engine, REQUEST, "too late")
        await draining
        with pytest.raises(EngineShutdown, match="shutting down"):
            await waiting
        await engine.cleanup()
        await engine.cleanup()
        context.destroy(linger=0)

    asyncio.run(live())
