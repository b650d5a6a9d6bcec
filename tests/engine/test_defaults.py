"""Default values of requests, and that each request is validated once."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jengine import LLM, AsyncLLM, InvalidArgument, SamplingParams
from jengine.api.backend import EngineThread
from jengine.core.request import Request, prompt_seed
from jengine.scheduling.requests.sequence_limits import SequenceLimits
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL

TEXT = "The quick brown fox"
RECOMMENDED = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=5)


@pytest.fixture(scope="module")
def folder(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("defaults")
    shutil.copytree(text_model, folder, dirs_exist_ok=True)
    given = {"temperature": 0.0, "repetition_penalty": 1.5, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(given))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    with on_demand():
        return LLM(folder, progress=False, **SMALL, max_model_len=192)


def tokens(llm: LLM, params: SamplingParams | None = None, prompt: Any = TEXT) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def test_the_models_defaults_where_no_parameters_are_given(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == RECOMMENDED
    recommended = tokens(llm, RECOMMENDED)
    assert tokens(llm) == recommended and len(recommended) == 5
    *_, streamed = llm.stream(TEXT)
    assert streamed.outputs[0].token_ids == recommended
    assert tokens(llm, SamplingParams(temperature=0.0, max_tokens=9)) == tokens(
        llm, SamplingParams(temperature=0.0, max_tokens=9)
    )
    assert len(tokens(llm, SamplingParams(temperature=0.0))) == 16, "what is given applies as it is"


def test_online_too(llm: LLM) -> None:
    async def main() -> tuple[SamplingParams, list[int]]:
        async with AsyncLLM.over(
            EngineThread(llm.engine), llm.tokenizer, llm.get_default_sampling_params()
        ) as online:
            outputs = [output async for output in online.generate(TEXT, output_kind="final")]
            return online.get_default_sampling_params(), outputs[-1].outputs[0].token_ids

    assert asyncio.run(main()) == (RECOMMENDED, tokens(llm))


def test_the_models_defaults_may_be_left_aside(folder: Path) -> None:
    with (
        on_demand(),
        LLM(folder, progress=False, **SMALL, max_model_len=192, generation_config="vllm") as llm,
    ):
        assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(InvalidArgument, match="generation_config='mine': must be one of auto, vllm, None"):
        LLM(folder, progress=False, generation_config="mine")


def test_a_request_is_validated_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    validate = SequenceLimits.validate

    def count(self: SequenceLimits, request: Request, eos_token_ids: tuple[int, ...]) -> None:
        seen.append(request.request_id)
        validate(self, request, eos_token_ids)

    monkeypatch.setattr(SequenceLimits, "validate", count)
    llm.generate([TEXT] * 3, SamplingParams(n=2, max_tokens=2), use_tqdm=False)
    assert len(seen) == len({*seen}) == 3, "a prompt's samples differ in their index alone"


def test_one_seed_gives_prompts_different_noise(llm: LLM) -> None:
    """The distribution is flat, so tokens depend only on the noise. A prompt gets the same noise at any index
    of the list.
    """
    flat = SamplingParams(temperature=1000.0, seed=7, max_tokens=8, ignore_eos=True)
    prompts: list[Any] = [[5, 6, 7], [5, 6, 8], [9]]
    forth, back = (
        [output.outputs[0].token_ids for output in llm.generate(order, flat, use_tqdm=False)]
        for order in (prompts, prompts[::-1])
    )
    assert len({*map(tuple, forth)}) == 3 and forth == back[::-1]
    assert forth == [tokens(llm, flat, prompt) for prompt in prompts]
    assert forth[0] != tokens(llm, flat.clone(seed=8), prompts[0])
    assert prompt_seed(-1, [1]) == prompt_seed(2**64 - 1, [1]) != prompt_seed(1, [1])
    assert prompt_seed(3, [1, 2]) == 14182119959678411541, "results of one version are those of the next"


def test_priorities(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[Request] = []
    add = llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda *requests: (queued.extend(requests), add(*requests)))
    llm.generate([TEXT] * 2, priority=[3, -1], use_tqdm=False)
    llm.generate([TEXT] * 2, priority=2, use_tqdm=False)
    assert [request.priority for request in queued] == [3, -1, 2, 2]
    queued.clear()
    llm.generate([TEXT] * 2, ttft_ms=[5e5, None], tpot_ms=4e5, client="anna", use_tqdm=False)
    assert [(request.ttft_ms, request.tpot_ms, request.client) for request in queued] == [
        (5e5, 4e5, "anna"),
        (None, 4e5, "anna"),
    ]
    met = llm.stats["targets"]["met"]
    assert met >= 2 and llm.stats["targets"]["missed"] == 0
    for level, field in (
        ({"ttft_ms": 0.0}, "ttft_ms"),
        ({"tpot_ms": "1"}, "tpot_ms"),
        ({"client": "x" * 257}, "client"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            llm.generate(TEXT, **level, use_tqdm=False)  # type: ignore[arg-type]
        assert refused.value.field == field
    for priority, limit in (([1], "must be one, or as many as prompts"), (1.5, "must be a whole number")):
        with pytest.raises(InvalidArgument, match=limit) as refused:
            llm.generate([TEXT] * 2, priority=priority, use_tqdm=False)  # type: ignore[arg-type]
        assert refused.value.field == "priority"


def test_the_strategy_can_be_changed(llm: LLM) -> None:
    for strategy in ("memory", "throughput"):
        llm.set_strategy(strategy)
        llm.generate(TEXT, use_tqdm=False)
        assert llm.stats["strategy"] == strategy and any(
            name.startswith(strategy) for name in llm.stats["decisions"]
        )
    with pytest.raises(
        InvalidArgument, match="strategy='speed': must be one of throughput, latency, memory, auto"
    ):
        llm.set_strategy("speed")
