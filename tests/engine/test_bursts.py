"""Bursts through the engine: the same tokens as in single steps, and no compilation."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jengine import LLM, AsyncLLM, EngineConfig, InvalidArgument, SamplingParams
from jengine.api.backend import EngineThread
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ResetPrefixCache
from jengine.engine.setup.measure import Bench
from jengine.engine.start import start_engine
from jengine.execution.batch import Batch, BatchLayout
from jengine.scheduling.step_plan import StepPlan
from tests.engine.counting import assert_idle
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, prompts, run

WORK = [
    ([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=50)),
    *[
        (prompt, SamplingParams(temperature=1.0, seed=i, max_tokens=20 + i))
        for i, prompt in enumerate(prompts(4, vocab=96, longest=90))
    ],
    ([9] * 20, SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=-3, max_tokens=33)),
    ([9] * 20, SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=29)),
    ([1], SamplingParams(temperature=1.0, seed=4, max_tokens=60, stop_token_ids=list(range(0, 96, 7)))),
    (
        [2],
        SamplingParams(
            temperature=1.0, seed=4, max_tokens=60, min_tokens=20, stop_token_ids=list(range(0, 96, 7))
        ),
    ),
    ([3], SamplingParams(temperature=0.0, max_tokens=1)),
    ([4], SamplingParams(temperature=0.0, max_tokens=None)),
]


def bursts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Number of bursts so far."""
    dispatch, seen = engine.runner.dispatch, list[int]()
    monkeypatch.setattr(engine.runner, "dispatch", lambda plan: seen.append(plan.steps) or dispatch(plan))
    return lambda: sum(steps > 1 for steps in seen)


@pytest.fixture(scope="module")
def llms(text_model: Path) -> list[LLM]:
    """An engine with single steps, and one with bursts."""
    # steps with drafts are no bursts
    options: dict[str, Any] = {**SMALL, "max_model_len": 192, "speculative_config": "none", "progress": False}
    with on_demand():
        return [LLM(text_model, **options, num_scheduler_steps=steps) for steps in (1, 8)]


@pytest.mark.parametrize(("how", "overlap"), [(8, True), ("auto", False)])
def test_tokens_are_those_of_single_steps(
    how: int | str, overlap: bool, llms: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, engine = [llm.engine for llm in llms]
    monkeypatch.setattr(engine, "overlap", overlap)
    monkeypatch.setattr(
        engine.scheduler, "options", dataclasses.replace(engine.scheduler.options, num_scheduler_steps=how)
    )
    run_so_far = bursts(engine, monkeypatch)
    answers = run(engine, WORK)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in run(plain, WORK)]
    for answer in answers:  # only the last token says why
        assert [update.finish_reason is None for update in answer.updates] == [True] * (
            len(answer.tokens) - 1
        ) + [False]
    assert run_so_far() > 5 and engine.compiles_since_start == 0


def test_rows_take_their_positions_from_the_device(llms: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's position of a row whose token is on the device is a bound, which programs do not read."""
    expected, pack, changed = (
        [answer.tokens for answer in run(llms[0].engine, WORK)],
        BatchLayout.pack,
        list[int](),
    )

    def with_bounds(layout: BatchLayout, plan: StepPlan) -> np.ndarray:
        buffer, at, rows = pack(layout, plan), Batch(*layout.offsets), layout.key.rows  # type: ignore[arg-type]
        device_fed = buffer[at.row_tokens : at.row_tokens + rows] < 0
        buffer[at.row_positions : at.row_positions + rows] += 3 * device_fed
        changed.append(int(device_fed.sum()))
        return buffer

    monkeypatch.setattr(BatchLayout, "pack", with_bounds)
    for llm in llms:
        assert [answer.tokens for answer in run(llm.engine, WORK)] == expected
    assert sum(changed) > 200


def test_measured_rows_are_at_their_positions(llms: list[LLM]) -> None:
    """Costs are measured in slots that belong to no request."""
    engine = llms[1].engine
    runner, ready = engine.runner, engine.scheduler.predictor.ready
    bench, key = Bench(runner, ready), ready.bursts()[0]
    for plan, end in (
        (bench.burst(key), 32 + key.steps),
        (bench.step(key.trunk, bench.rows_of(key.trunk), 50), 51),
    ):
        bench.seconds(plan)
        assert {runner.worker.state.slots.last[span.slot, 1].item() for span in plan.spans} == {end}
    engine.do(ResetPrefixCache())  # its pages were written


@pytest.mark.full
@pytest.mark.parametrize("variant", ["gemma2", "mistral_window", "gpt2"])
def test_other_families(
    variant: str, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [answer.tokens for answer in run(make_engine(variant), WORK)]
    engine = make_engine(variant, num_scheduler_steps=8)
    run_so_far = bursts(engine, monkeypatch)
    assert [answer.tokens for answer in run(engine, WORK)] == expected
    assert run_so_far() > 5


def test_stop_strings_and_what_needs_the_host(llms: list[LLM]) -> None:
    text = (
        llms[0]
        .generate("The", SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)[0]
        .outputs[0]
        .text
    )
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=60, stop=[text[at : at + 2]], include_stop_str_in_output=at % 2 == 0
        )
        for at in (3, 11, 20, 21, 22)
    ]
    params += [
        SamplingParams(temperature=0.0, max_tokens=30, logprobs=2),
        SamplingParams(seed=3, max_tokens=30, structured_outputs={"regex": "[a-d]{3,9}x"}),
        SamplingParams(seed=3, max_tokens=30, repetition_penalty=1.3),
    ]
    compiles = llms[1].engine.compiles_since_start
    plain, burst = (
        [llm.generate("The", one, use_tqdm=False)[0].outputs[0] for one in params] for llm in llms
    )
    assert burst == plain
    assert [llm.generate(["The"] * len(params), params, use_tqdm=False)[0].outputs[0] for llm in llms] == [
        plain[0]
    ] * 2
    assert llms[1].engine.compiles_since_start == compiles


@pytest.fixture
def online(llms: list[LLM]) -> Iterator[AsyncLLM]:
    online = AsyncLLM.over(EngineThread(llms[1].engine), llms[1].tokenizer)
    yield online
    asyncio.run(online.close())
    assert_idle(online)


def test_aborts_and_arrivals_within_bursts(llms: list[LLM], online: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    expected = llms[0].generate("The quick", params, use_tqdm=False)[0].outputs[0]

    async def run_all() -> None:
        first, aborted = online.submit("The quick", params), online.submit("The slow", params)
        assert (await anext(aborted)).outputs[0].token_ids
        aborted.abort()  # unless it has ended meanwhile
        assert (await anext(aborted)).outputs[0].finish_reason in ("abort", "length")
        late = online.submit("The quick", params, output_kind="delta")
        tokens = [token async for output in late for token in output.outputs[0].token_ids]
        last = None
        async for output in first:
            last = output
        assert last is not None and last.outputs[0].token_ids == tokens == expected.token_ids

    asyncio.run(run_all())


def test_an_llm_runs_bursts_by_default(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {**SMALL, "max_model_len": 192, "speculative_config": "none", "progress": False}
    with on_demand(), LLM(text_model, **options) as llm:
        assert llm.engine.scheduler.options.num_scheduler_steps == "auto"
        run_so_far = bursts(llm.engine, monkeypatch)
        llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        assert run_so_far() > 0


@pytest.mark.parametrize(
    ("offline", "options"),
    [
        (False, {}),
        (True, {"batch_invariant": True}),
        (True, {"tile_size": 4}),
        (True, {"num_scheduler_steps": 1}),
    ],
)
def test_by_default_steps_are_single_elsewhere(
    offline: bool, options: dict[str, Any], text_model: Path
) -> None:
    config = EngineConfig.of(str(text_model), {**SMALL, "max_model_len": 192, **options})
    with on_demand():
        engine, _ = start_engine(config, progress=False, offline=offline)
    assert engine.scheduler.table.steps == engine.scheduler.options.num_scheduler_steps == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_scheduler_steps": 4}, "num_scheduler_steps"),
        ({"num_scheduler_steps": "always"}, "num_scheduler_steps"),
        ({"num_scheduler_steps": 8, "batch_invariant": True}, "num_scheduler_steps"),
        ({"num_scheduler_steps": "auto", "tile_size": 4}, "tile_size"),
    ],
)
def test_what_cannot_be_had_is_rejected(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match="num_scheduler_steps") as wrong:
        EngineConfig.of("demo", options)
    assert wrong.value.field == field
