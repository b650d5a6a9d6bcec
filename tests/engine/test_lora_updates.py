"""Adapters while the model's weights are replaced, and while the engine is paused or sleeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jengine import EngineConfig, InvalidArgument
from jengine.core.request import SamplingParams
from jengine.core.updates import TokenUpdate
from jengine.core.weights import PauseMode
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ListLoras, Pause, Resume, Sleep, UnloadLora, UpdateWeights, WakeUp
from jengine.spi import start_engine
from tests.engine.loras import Work, add, load, prompts, run_adapted
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Answer, requests_of
from tests.engine.test_lora import LORA
from tests.engine.test_weight_updates import tensors
from tests.golden.loras import lora
from tests.golden.weights import write_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)
NAMES = ["x", "y", None]
WORK: list[Work] = [(prompt, PARAMS, name) for prompt, name in zip(prompts(3, 40), NAMES, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, "llama_gqa")
    return folder


def started(folder: Path, params: Any = None, **options: Any) -> Engine:
    """With the adapters x and y. Bits do not depend on the steps, which costs that were measured shape."""
    exact = {"max_model_len": 96, "batch_invariant": True}
    config = EngineConfig.of(str(folder), {**SMALL, **LORA, **exact, **options})
    with on_demand(optimized=True):
        engine = start_engine(config, params=params, progress=False)[0]
    for name in "xy":
        load(engine, name, lora("llama_gqa", "plain", name))
    return engine


def said(answers: Sequence[Answer]) -> list[list[Any]]:
    return [[(update.token, update.logprobs) for update in answer.updates] for answer in answers]


def hold(engine: Engine, number: int, work: Work) -> str:
    """Adds a request to a paused engine. Returns its id."""
    prompt, params, name = work
    [request] = requests_of(str(number), prompt, params)
    request.lora_name = name
    assert engine.add(request) == []
    return request.request_id


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return started(folder, weight_updates=True)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[Any]]]:
    """Answers of fresh engines, by the number of the weights."""
    return [said(run_adapted(started(folder, tensors(number)), WORK)) for number in range(2)]


def test_new_weights_serve_adapters_as_a_fresh_engine(engine: Engine, expected: list[list[Any]]) -> None:
    """To the last bit; and no page is found that other weights computed."""
    for number in (0, 1, 0):
        engine.do(UpdateWeights(tensors(number)))
        assert said(run_adapted(engine, WORK)) == expected[number]


def test_running_requests_go_on_with_the_new_weights_and_their_adapters(engine: Engine, folder: Path) -> None:
    engine.do(UpdateWeights(tensors(0)))
    updated = list[int]()

    def update() -> None:
        by_id = engine.scheduler.registry.by_id.values()
        if not updated and all(len(s.tokens) >= s.prompt_len + 3 for s in by_id):
            updated.append(1)
            engine.do(UpdateWeights(tensors(1)))

    answers = run_adapted(engine, WORK, update)
    fresh = started(folder, tensors(1))
    for (prompt, params, name), answer in zip(WORK, answers, strict=True):
        made = [update.version for update in answer.updates]
        first = made.index(made[-1])
        assert 0 < first < len(made) and answer.sequence.num_preemptions == 1
        rest = prompt + answer.tokens[:first], params.clone(max_tokens=len(made) - first), name
        [other] = run_adapted(fresh, [rest])
        assert answer.tokens[first:] == other.tokens


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_keeps_adapters(level: int, mode: PauseMode, engine: Engine, expected: list[list[Any]]) -> None:
    """The running requests go on, finish before or end, and those that come meanwhile wait."""
    engine.do(UpdateWeights(tensors(0)))
    running = [answer for i, one in enumerate(WORK) for answer in add(engine, i, one)]
    by_id = {answer.sequence.request_id: answer for answer in running}
    held: dict[str, list[TokenUpdate]] = {}

    def step() -> None:
        for update in engine.step():
            if isinstance(update, TokenUpdate):
                known = by_id.get(update.request_id)
                (held[update.request_id] if known is None else known.updates).append(update)
        engine.scheduler.check_integrity()

    while any(len(answer.updates) < 3 for answer in running):
        step()
    while not engine.do(Sleep(level, mode)):
        step()
    held |= {hold(engine, i, one): [] for i, one in enumerate(WORK, len(WORK))}
    engine.do(WakeUp())
    if level == 2:
        engine.do(UpdateWeights(tensors(0)))
    while engine.has_work:
        step()
    count = PARAMS.max_tokens if mode != "abort" else None
    for answer, tokens in zip(said(running), expected[0], strict=True):
        assert [token for token, _ in answer] == [token for token, _ in tokens[: len(answer)]]
        assert len(answer) == count or (count is None and 3 <= len(answer) < len(tokens))
    for updates, tokens in zip(held.values(), expected[0], strict=True):
        assert [update.token for update in updates] == [token for token, _ in tokens]


def test_a_request_at_the_gate_keeps_its_adapter(folder: Path) -> None:
    """Although it is unloaded, or replaced."""
    engine = started(folder)
    assert engine.loras is not None
    expected = said(run_adapted(engine, WORK))
    engine.do(Pause("keep"))
    *held, given_up = [hold(engine, i, one) for i, one in enumerate([*WORK, WORK[1]])]
    updates: dict[str, list[Any]] = {request_id: [] for request_id in held}
    assert engine.load.loras is not None and engine.load.loras.waiting == ("x", "y")
    engine.do(UnloadLora("x"))
    load(engine, "y", lora("llama_gqa", "plain", "other"), load_inplace=True)
    engine.end(given_up, "abort")
    assert [info.name for info in engine.do(ListLoras())] == ["y"]
    assert len(engine.loras.packed) == 3
    engine.do(Resume())
    while engine.has_work:
        for update in engine.step():
            assert isinstance(update, TokenUpdate)
            updates[update.request_id].append((update.token, update.logprobs))
        engine.scheduler.check_integrity()
    assert [*updates.values()] == expected
    assert len(engine.loras.packed) == 1


def test_no_adapter_is_forgotten_that_a_request_at_the_gate_has(folder: Path) -> None:
    engine, other = started(folder, max_cpu_loras=2), lora("llama_gqa", "plain", "other")
    engine.do(Pause("keep"))
    held = [hold(engine, i, one) for i, one in enumerate(WORK)]
    with pytest.raises(InvalidArgument, match="max_cpu_loras=2 adapters are loaded; all of them are in use"):
        load(engine, "z", other, keep=())
    with pytest.raises(InvalidArgument, match="adapters are loaded; that of this name is in use"):
        load(engine, "x", other, load_inplace=True)
    engine.end(held[0], "abort")
    load(engine, "x", other, load_inplace=True)
    assert [info.name for info in engine.do(ListLoras())] == ["y", "x"]
    load(engine, "z", other, keep=())
    assert [(info.name, info.waiting) for info in engine.do(ListLoras())] == [("y", 1), ("z", 0)]
    engine.end(held[1], "abort")
    engine.end(held[2], "abort")
    engine.do(Resume())
    assert not engine.has_requests
