"""Ranks whose trunks run through the stages of a pipeline. test_many_devices.py runs this as it runs
many_devices.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.core.updates import Ended, TokenUpdate
from jengine.engine.ranks import RankedEngine
from jengine.engine.setup import program_set, stages_and_ranks
from jengine.engine.start import start_engine
from jengine.execution.kinds import Key
from jengine.execution.programs import Programs
from jengine.execution.runner import PendingSample
from jengine.execution.spec import ExecutionSpec
from jengine.models.stages import stages_of
from jengine.parallel.layout import Layout
from jengine.parallel.link import SingleProcess
from jengine.parallel.mesh import stage_meshes
from jengine.scheduling.costs.step_costs import SwapCosts
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import TrunkKey
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, limit_pages, requests_of
from tests.engine.running import run as answers_of
from tests.execution.specs import make_spec, temporaries_bound
from tests.golden.weights import VARIANTS, Golden, max_model_len, write_model
from tests.parallel.many_devices import collectives, in_loops
from tests.parallel.ranks_on_devices import GREEDY, check_all_kinds, check_goldens, run, started

LAYOUTS = [(2, 2, 1), (2, 2, 2), (2, 4, 1), (3, 2, 1)]  # stages, ranks, tensor
SMALLEST = "deepseek_v3", (2, 2, 1)
FULL = pytest.mark.full


class Seen:
    """What the ranks of an engine run: of each joint trunk, the ranks with a step, and their plans."""

    def __init__(self, engine: RankedEngine) -> None:
        self.steps: list[Mapping[int, StepPlan]] = []
        self._begin, engine.runner.begin_all = engine.runner.begin_all, self._noted  # type: ignore[method-assign]

    def _noted(self, plans: Mapping[int, StepPlan], key: TrunkKey) -> dict[int, PendingSample]:
        self.steps.append(plans)
        return self._begin(plans, key)


def check_rounds(engine: RankedEngine, stages: int) -> None:
    """A rank with many sequences and one with a single one: as many steps run at once as there are stages,
    and none of them waits for the one before. A lone sequence then runs from step to step.
    """
    prompts = [[3 + i, 5, 7 + i] for i in range(1 + 2 * stages)]
    alone = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        rank = engine.ranks[0 if i else 1]
        rank.add(*requests_of(str(i), prompt, GREEDY if i else alone))
    for _ in range(3 * stages):
        engine.step()
    seen = Seen(engine)
    rounds = 3
    for _ in range(rounds * stages):
        engine.step()
        flying = [rank.scheduler.cohorts.recent(stages) for rank in engine.ranks[:2]]
        assert flying == [stages, 1]
    assert [len(plans[0].spans) for plans in seen.steps] == [2] * rounds * stages
    assert all(plans[0].overtakes == stages - 1 for plans in seen.steps)
    # its token comes once a round, so it makes no step wait
    assert sum(1 in plans for plans in seen.steps) == rounds
    while engine.ranks[0].has_work:
        engine.step()
    seen.steps.clear()
    while engine.has_work:
        engine.step()
    assert seen.steps and all([*plans] == [1] for plans in seen.steps)


def check_aborts(engine: RankedEngine, variant: str) -> None:
    """Others keep their tokens, whatever ranks and cohorts those that end were in."""
    cases = Golden.read(variant).cases
    for i, case in enumerate(cases):
        for n in range(2):
            engine.add(*requests_of(f"{i}-{n}", case.prompt.tolist(), GREEDY))
    tokens: dict[str, list[int]] = {f"{i}-{n}.0": [] for i in range(len(cases)) for n in range(2)}
    ends = Counter[str]()
    while engine.has_work:
        for update in engine.step():
            assert isinstance(update, TokenUpdate | Ended)
            if isinstance(update, TokenUpdate):
                tokens[update.request_id].append(update.token)
            ends[update.request_id] += isinstance(update, Ended) or update.finish_reason is not None
        for i in range(len(cases)):
            if len(tokens[f"{i}-1.0"]) == 1 + 2 * i and not ends[f"{i}-1.0"]:
                assert engine.end(f"{i}-1.0", "abort")
                ends[f"{i}-1.0"] += 1
        for rank in engine.ranks:
            rank.scheduler.check_integrity()
    assert ends == dict.fromkeys(tokens, 1)
    for i, case in enumerate(cases):
        assert tokens[f"{i}-0.0"] == case.tokens.tolist()
        assert tokens[f"{i}-1.0"] == case.tokens.tolist()[: 1 + 2 * i]


@pytest.mark.parametrize(
    ("variant", "stages", "data", "tensor"),
    [
        pytest.param(variant, *layout, marks=() if (variant, layout) == SMALLEST else FULL)
        for variant in ("qwen3_moe", "deepseek_v2", "deepseek_v3", "qwen3_moe_mixed", "gpt_oss", "qwen3_next")
        for layout in LAYOUTS
    ],
)
def test_tokens(variant: str, stages: int, data: int, tensor: int, tmp_path: Path) -> None:
    if VARIANTS[variant]["num_hidden_layers"] < stages:
        pytest.skip(f"{variant} has too few layers")
    with on_demand():
        engine = started(tmp_path, variant, data, tensor, pipeline_parallel_size=stages)
    check_goldens(engine, variant)
    check_goldens(engine, variant)
    assert engine.ranks[-1].scheduler.prefixes.hits
    check_rounds(engine, stages)
    check_aborts(engine, variant)
    for rank in engine.ranks:
        limit_pages(rank, 1 + rank.scheduler.limits.most_pages(100))
    # each rank has room for all of its prompts, but not for what they grow to
    work: list[Any] = [([3 + 7 * i % 61] * 15, GREEDY) for i in range(6 * data)]
    found = run(engine, work)
    assert sum(rank.scheduler.registry.num_preemptions for rank in engine.ranks)
    assert [run(engine, [one])[0] for one in work] == found


@pytest.mark.full
def test_tokens_of_all_kinds_of_requests(tmp_path: Path) -> None:
    """Samples that share pages, masks, penalties, and pages that go to the host and come back: tokens are
    those of one device.
    """
    many = {"pipeline_parallel_size": 2, "swap_space": 0.01}
    with on_demand():
        ranks = started(tmp_path, "qwen3_moe", 2, 1, **many)
        options = {**SMALL, "max_model_len": max_model_len("qwen3_moe"), "dtype": "float32"}
        one, _ = start_engine(EngineConfig.of(str(tmp_path), options), progress=False)
    prompts = [[at * 7 % 61 + 3 for at in range(i, i + length)] for i, length in ((3, 40), (9, 70), (1, 17))]
    work: list[Any] = [
        *[(prompt, GREEDY) for prompt in prompts],
        (prompts[0], SamplingParams(temperature=0.9, seed=7, n=3, max_tokens=12)),
        (prompts[1], SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.4)),
        (prompts[1], SamplingParams(temperature=0.0, max_tokens=12, allowed_token_ids=[3, 5, 8, 13, 21])),
    ]
    growing: list[Any] = [([at * 5 % 61 + 3 for at in range(i, i + 15)], GREEDY) for i in range(0, 60, 5)]
    expected = [answer.tokens for answer in answers_of(one, work + growing)]

    def tokens() -> list[list[int]]:
        return [[token for token, _ in answer] for answer in run(ranks, work + growing)]

    assert tokens() == expected
    for rank in ranks.ranks:
        limit_pages(rank, 27)
        rank.scheduler.predictor.costs.swaps = SwapCosts(0.0, 0.0, 0.0)
    assert tokens() == expected == tokens()
    assert any(rank.scheduler.prefixes.host_hits for rank in ranks.ranks)
    check_all_kinds(ranks)


@pytest.mark.full
def test_stages_of_ranks_have_the_collectives_that_were_written() -> None:
    """Hidden states of all ranks enter and leave a stage where they are."""
    spec = in_two_stages(make_spec("qwen3_moe", devices=2, ranks=2, expert_parallel=True), tensor=2)
    key = spec.table.trunks()[-1]
    for stage in spec.stages:
        compiled, layers = (
            Programs(stage, None, threads=2, progress=False, first=[key]),
            len(stage.stage.layers),
        )
        assert collectives(compiled[key]) == {
            "all-reduce": 2 * layers + stage.stage.first,
            "all-gather": layers,
            "reduce-scatter": layers,
        }
        assert not in_loops(compiled[key])
        memory = compiled.memory[key]
        assert memory.aliased >= stage.cache_bytes, "each rank's cache is updated in place"
        assert memory.temporaries <= temporaries_bound(stage, key)


def in_two_stages(spec: ExecutionSpec, tensor: int = 1) -> ExecutionSpec:
    """A spec of two ranks and two layers."""
    meshes = stage_meshes(Layout(stages=2, data=2, tensor=tensor, expert_parallel=True))
    stages = stages_of(spec.model, (1, 1))
    return dataclasses.replace(spec, pipeline=tuple(zip(stages, meshes, strict=True)))


class Named(Programs):
    """Programs that have only names, since nothing runs."""

    def obtain(self, keys: Sequence[Key], **_: object) -> Generator[Key]:
        self._programs |= dict.fromkeys(keys)
        yield from keys


@pytest.mark.parametrize("stages", [1, 2])
def test_no_program_is_left_for_later(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks run together and what each runs alone are all programs of the table."""
    monkeypatch.setattr(program_set, "Programs", Named)
    monkeypatch.setattr(stages_and_ranks, "make_ranks", lambda *parts: parts)
    spec = make_spec("qwen3_moe", ranks=2, expert_parallel=True)
    if stages > 1:
        spec = in_two_stages(spec)
    assert len(spec.stages) == stages
    _, programs = stages_and_ranks.prepare_ranks(EngineConfig(model="", warm_up="all"), spec, [], 0, False)
    assert programs.obtain_others(SingleProcess()) is None
    trunk, sampler = spec.table.trunks()[0], spec.table.samplers()[0]
    assert trunk in programs.programs and sampler not in programs.programs


@pytest.mark.full
@pytest.mark.parametrize("stages", [1, 2])
def test_compiled_once_then_loaded(stages: int, tmp_path: Path) -> None:
    """With costs that were measured, unlike the other tests here."""
    write_model(tmp_path, "qwen3_moe")
    config = EngineConfig.of(
        str(tmp_path),
        {
            **SMALL,
            "max_model_len": max_model_len("qwen3_moe"),
            "dtype": "float32",
            "data_parallel_size": 2,
            "enable_expert_parallel": True,
            "pipeline_parallel_size": stages,
            "cache_dir": str(tmp_path / "cache"),
        },
    )
    for compiled in (True, False):
        engine, facts = start_engine(config, progress=False)
        assert (facts.programs_compiled > 0) == compiled and (facts.programs_loaded == 0) == compiled
        assert isinstance(engine, RankedEngine)
        check_goldens(engine, "qwen3_moe")
        engine.close()
