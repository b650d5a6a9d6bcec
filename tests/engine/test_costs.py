"""Costs are measured at the first start, refined by steps, saved, loaded by the next start, and can be
displayed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jengine import LLM, AsyncLLM, EngineDead, SamplingParams, cli
from jengine.core.config import EngineConfig
from jengine.engine.loop.engine import Engine
from jengine.engine.setup import program_set
from jengine.engine.setup.shapes import describe_engine
from jengine.engine.start import start_engine
from jengine.execution.cache_folders import measured_costs
from jengine.execution.runner import InFlight, StepResult
from jengine.insight.recording.cost_report import CostReport
from jengine.scheduling.costs.step_costs import FIRST, StepCosts
from jengine.table.program_table import TrunkKey
from tests.engine.running import SMALL, prompts, run
from tests.test_display import Visible

OPTIONS: dict[str, Any] = {**SMALL, "max_num_batched_tokens": 72, "max_model_len": 192}


def start(model: Path, **options: Any) -> Engine:
    return start_engine(EngineConfig.of(str(model), {**OPTIONS, **options}), progress=False)[0]


@pytest.fixture(scope="module")
def saved(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the programs of all tests and measured costs."""
    cache: Path = tmp_path_factory.mktemp("costs")
    start(text_model, cache_dir=cache).close()
    return cache


@pytest.fixture
def cache(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "cache"))


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forces waiting for each step: steps of tiny models may finish before they are read, and would not
    count.
    """
    read = program_set.Runner.read

    def waited(self: Any, step: InFlight) -> StepResult:
        return dataclasses.replace(read(self, step), waited=True)

    monkeypatch.setattr(program_set.Runner, "read", waited)


def load(cache: Path) -> StepCosts:
    [file] = measured_costs(cache)
    return StepCosts.from_json(file.read_bytes())


def generate(engine: Engine) -> None:
    how = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=1, max_tokens=20),
    ]
    run(engine, [(prompt, how[i % 2]) for i, prompt in enumerate(prompts(12, vocab=200, longest=120))])


def test_the_first_start_measures_every_program(saved: Path) -> None:
    costs = load(saved)
    assert {*costs.known} == {*costs.table.trunks(), *costs.table.samplers()}
    assert all(0.0 < cost.seconds < 60.0 and cost.steps == FIRST for cost in costs.known.values())
    assert all(0.0 <= slope < 1e-3 and math.isfinite(slope) for slope in costs.slopes)


def test_costs_of_engines_with_bursts_serve_those_without_and_the_other_way_round(
    text_model: Path, saved: Path, tmp_path: Path
) -> None:
    """An LLM has bursts by default; `jengine simulate` and `plan` describe a server."""
    options = {**OPTIONS, "cache_dir": saved}
    config, spec = describe_engine(EngineConfig.of(str(text_model), options))
    several = EngineConfig.of(str(text_model), {**options, "num_scheduler_steps": 8})
    with_bursts, spec_of_bursts = describe_engine(several)
    measured = program_set.saved_costs(config, spec)
    costs = program_set.saved_costs(with_bursts, spec_of_bursts)
    assert measured is not None and costs is not None
    assert (measured.table.steps, costs.table.steps) == (1, 8)
    assert all(costs.known[key].seconds == cost.seconds for key, cost in measured.known.items())

    program_set.CostsFile(tmp_path, spec_of_bursts.fingerprint()).save(costs)
    back = program_set.saved_costs(dataclasses.replace(config, cache_dir=tmp_path), spec)
    assert back is not None and back.table == spec.table
    assert {key: cost.seconds for key, cost in back.known.items()} == {
        key: cost.seconds for key, cost in measured.known.items()
    }


def test_a_later_start_measures_nothing_and_goes_on_from_what_was_refined(
    text_model: Path, cache: Path, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_set, "measure", None)
    measured = load(cache)
    engine = start(text_model, cache_dir=cache)
    first = engine.scheduler.predictor.costs
    assert first.to_json() == measured.to_json()
    generate(engine)
    assert load(cache).to_json() == measured.to_json(), "saved at the end only"
    engine.close()
    refined = load(cache)
    assert refined.to_json() == first.under_usual_load().to_json() != measured.to_json()
    assert sum(cost.steps - FIRST for key, cost in refined.known.items() if isinstance(key, TrunkKey)) > 20
    assert start(text_model, cache_dir=cache).scheduler.predictor.costs.to_json() == refined.to_json()


def test_an_engine_that_is_forgotten_saves_what_it_learned(
    text_model: Path, cache: Path, waiting: None
) -> None:
    before = load(cache).to_json()
    generate(start(text_model, cache_dir=cache))
    gc.collect()
    assert load(cache).to_json() != before


def test_what_cannot_be_read_is_measured_again(text_model: Path, cache: Path) -> None:
    [file] = measured_costs(cache)
    file.write_bytes(b'{"programs": 3}')
    assert start(text_model, cache_dir=cache).scheduler.predictor.costs.measured
    assert {*load(cache).table.trunks()} <= {*load(cache).known}


def test_what_was_cleared_stays_cleared(text_model: Path, cache: Path, waiting: None) -> None:
    engine = start(text_model, cache_dir=cache)
    generate(engine)
    assert cli.main(["cache", "--cache-dir", str(cache), "clear", "--yes"]) == 0
    engine.close()
    assert measured_costs(cache) == []


def test_steps_that_are_more_than_programs_do_not_count(text_model: Path, cache: Path, waiting: None) -> None:
    """Each step here has prompt log probabilities, counts for penalties, or masks."""
    engine = start(text_model, cache_dir=cache)
    before = engine.scheduler.predictor.costs.to_json()
    params = {"max_tokens": 1, "temperature": 0.0}
    for more in {"prompt_logprobs": 1}, {"frequency_penalty": 0.5}, {"allowed_token_ids": [5, 6]}:
        run(engine, [([1, 2, 3], SamplingParams(**params, **more))])  # type: ignore[arg-type]
    costs, after = engine.scheduler.predictor.costs, StepCosts.from_json(before)
    assert (costs.known, costs.slopes) == (after.known, after.slopes)


def test_costs_can_be_looked_at(text_model: Path, cache: Path) -> None:
    with LLM(text_model, progress=False, cache_dir=cache, num_scheduler_steps=1, **OPTIONS) as llm:
        report = llm.costs()
        costs = llm.engine.scheduler.predictor.costs
    with pytest.raises(EngineDead):
        llm.costs()
    assert [trunk.program for trunk in report.trunks] == [str(key) for key in costs.table.trunks()]
    for trunk in report.trunks:
        assert trunk.seconds[0] <= trunk.seconds[1024] <= trunk.seconds[8192] and trunk.steps == FIRST
    assert report.trunks[0].seconds[0] == costs.base(costs.table.trunks()[0])
    text = str(report)
    assert "trunk[8+0t]" in text and "sampler[8,full]" in text and "after 8,192" in text
    shown = report._repr_html_()
    assert ("data:image/png;base64,iVBOR" in shown) == bool(find_spec("matplotlib"))
    assert "trunk[8+0t]" in Visible(shown.replace("/>", "></img>")).text


def test_an_async_llm_has_them_too_where_its_engine_is(text_model: Path, cache: Path) -> None:
    async def ask() -> CostReport:
        async with AsyncLLM(text_model, progress=False, cache_dir=cache, **OPTIONS) as llm:
            return llm.costs()

    costs = load(cache)
    assert asyncio.run(ask()).samplers[0].seconds == costs.base(costs.table.samplers()[0])


def test_the_command_prints_what_was_measured(
    text_model: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = ["plan", str(text_model), *options]
    assert cli.main([*command, f"--cache-dir={cache}"]) == 0
    assert "trunk[8+0t]" in capsys.readouterr().out
    others = [f"--cache-dir={tmp_path / 'empty'}"], [f"--cache-dir={cache}", "--max-num-seqs=4"]
    for other in others:  # another folder, another table
        assert cli.main([*command, *other]) == 0
        assert "No engine with these options has measured its steps" in capsys.readouterr().out
    assert cli.main([*command, f"--cache-dir={cache}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["costs"] is not None
    assert cli.main([*command, "--exact"]) == 2
    assert "exact=True: needs --target NAME" in capsys.readouterr().err
