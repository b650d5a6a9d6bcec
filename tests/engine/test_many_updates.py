"""Many updates of weights among many requests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jengine import EngineConfig, SamplingParams
from jengine.base.compiles import compile_count
from jengine.checkpoints import resolve
from jengine.checkpoints.in_memory import assemble_on_devices
from jengine.core.updates import Ended, TokenUpdate
from jengine.core.weights import PauseMode, Version
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import Pause, Resume, UpdateWeights
from jengine.hub.files import HUB_FILES
from jengine.spi import start_engine
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, requests_of, run
from tests.golden.weights import write_model

OPEN = 8  # requests at once
SETS = 3  # of weights, which updates take in turn
OPTIONS: dict[str, Any] = {**SMALL, "max_model_len": 96, "batch_invariant": True, "tile_size": 16}
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, logprobs=1, ignore_eos=True)


@dataclass
class Model:
    folder: Path
    sets: list[dict[str, np.ndarray]]

    def start(self, params: Any = None, **options: Any) -> Engine:
        with on_demand(optimized=True):
            config = EngineConfig.of(str(self.folder), {**OPTIONS, **options})
            return start_engine(config, params=params, progress=False)[0]


def model(folder: Path) -> Model:
    [file] = folder.glob("*.safetensors")
    rng, sets = np.random.default_rng(0), []
    for scale in range(SETS):
        tensors = {name: array.astype(np.float32) for name, array in sorted(load_file(file).items())}
        for array in tensors.values():
            array += 0.1 * scale * array.std() * rng.standard_normal(array.shape, np.float32)
        sets.append(tensors)
    return Model(folder, sets)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, "llama_gqa")
    return model(folder)


def held() -> int:
    """Bytes of all arrays of this process."""
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes held after each parameter that an update has made."""
    found = list[int]()

    def noting(*what: Any) -> jax.Array:
        made = assemble_on_devices(*what)
        found.append(held())
        return made

    monkeypatch.setattr("jengine.checkpoints.weights.assemble_on_devices", noting)
    yield found


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_updates_among_running_requests(small: Model, mode: PauseMode, peak: list[int]) -> None:
    check(small, mode, requests=60, updates=5, peak=peak)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_two_hundred_updates_among_five_thousand_requests(mode: PauseMode, peak: list[int]) -> None:
    check(model(resolve("demo", None, HUB_FILES)), mode, requests=5000, updates=200, peak=peak)


def check(model: Model, mode: PauseMode, *, requests: int, updates: int, peak: list[int]) -> None:
    """No compilation; memory stays the same, and never exceeds it by more than the largest parameter; every
    answer is that of a fresh engine with the weights that it names, or the beginning of it.
    """
    engine = model.start(weight_updates=True)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, engine.model.vocab_size, 1 + i % 40).tolist() for i in range(requests)]
    given = [{name: jax.device_put(array) for name, array in tensors.items()} for tensors in model.sets]
    run(engine, [(prompt, PARAMS) for prompt in prompts[:40]])
    engine.do(UpdateWeights(given[0]))
    settle(engine)
    before, counted, beside = held(), compile_count(), list[int]()

    def update(number: int) -> None:
        peak.clear()
        now = held()
        assert engine.do(UpdateWeights(given[number % SETS])) == number + 1
        assert len(peak) == len(engine.runner.worker.state.leaves)  # type: ignore[attr-defined]
        beside.append(max(peak) - now)

    answers = answers_of(engine, prompts, update, mode, updates)
    settle(engine)
    assert compile_count() == counted and held() == before
    largest = max(array.nbytes for array in jax.tree.leaves(engine.runner.worker.state.leaves))  # type: ignore[attr-defined]
    most = max(beside)
    assert len(beside) == updates and most <= largest
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.owned == 0 and len(answers) == requests
    ended = [answer for answer in answers if answer.reason == "length"]
    print(
        f"{mode}: {requests} requests, {updates} updates, {len(ended)} complete, "
        f"{len({update.version for answer in answers for update in answer.updates})} versions, "
        f"at most {most / 1e6:.3f} MB beside {before / 1e6:.3f} MB, largest parameter {largest / 1e6:.3f} MB"
    )
    assert len(ended) == requests or (mode == "abort" and len(ended) > requests / 4)
    if mode == "keep":
        several = [answer for answer in answers if len({update.version for update in answer.updates}) > 1]
        assert len(several) >= updates and all(map(in_order, several))
        return
    for number, tensors in enumerate(model.sets):
        own = [i for i, answer in enumerate(answers) if number_of(answer) == number]
        fresh = run(model.start(tensors), [(prompts[i], PARAMS) for i in own])
        for i, other in zip(own, fresh, strict=True):
            said = [(update.token, update.logprobs) for update in answers[i].updates]
            assert said == [(update.token, update.logprobs) for update in other.updates][: len(said)]


def number_of(answer: Answered) -> int | None:
    """The number of the weights that made an answer; None if it was aborted before its first token."""
    versions = {update.version for update in answer.updates}
    if not versions:
        assert answer.reason == "abort"
        return None
    [version] = versions
    assert isinstance(version, int)
    return (version - 1) % SETS


def in_order(answer: Answered) -> bool:
    versions: list[Version] = [update.version for update in answer.updates]
    return versions == sorted(versions)  # type: ignore[type-var]


def settle(engine: Engine) -> None:
    """Runs a last step that is always the same, whose results the engine keeps until the next."""
    run(engine, [([1, 2, 3], PARAMS)])
    gc.collect()


@dataclass
class Answered:
    updates: list[TokenUpdate]
    reason: str | None = None


def answers_of(
    engine: Engine, prompts: list[list[int]], update: Callable[[int], None], mode: PauseMode, updates: int
) -> list[Answered]:
    """Has requests arrive as others end, also while the engine is paused, and updates the weights."""
    answers = [Answered([]) for _ in prompts]
    aborted = OPEN * updates if mode == "abort" else 0
    interval = max((len(prompts) - aborted) // (updates + 2), 3)
    waiting, ended, complete, done = iter(enumerate(prompts)), 0, 0, 0
    open_ = set[str]()
    while ended < len(prompts):
        while len(open_) < OPEN and (one := next(waiting, None)) is not None:
            [request] = requests_of(str(one[0]), one[1], PARAMS)
            open_.add(request.request_id)
            engine.add(request)
        for news in engine.step():
            answer = answers[int(news.request_id.split(".")[0])]
            if isinstance(news, TokenUpdate):
                answer.updates.append(news)
            reason = news.reason if isinstance(news, Ended) else news.finish_reason  # type: ignore[union-attr]
            if reason is not None:
                assert answer.reason is None
                answer.reason = reason
                ended, complete = ended + 1, complete + (reason == "length")
                open_.remove(news.request_id)
        if engine.gate.mode is None and done < updates and complete >= (done + 1) * interval:
            engine.do(Pause(mode))
        if engine.gate.mode is not None and not engine.has_work:
            done += 1
            update(done)
            engine.do(Resume())
    while done < updates:
        done += 1
        update(done)
    return answers
