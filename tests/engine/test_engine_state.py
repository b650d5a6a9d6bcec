"""An engine in the place of another is brought to the state that operations have left that one in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jengine.base.errors import ModelError
from jengine.engine.engine_state import EngineState
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import (
    GetPauseState,
    LoadWeights,
    Operation,
    Pause,
    Resume,
    SetStrategy,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from tests.engine.running import run
from tests.engine.test_weight_updates import WORK, parameters, said, started, tensors
from tests.golden.weights import write_model

FIRST, SECOND = LoadWeights("first", 1), LoadWeights("second", "best")  # folders below a temporary one
WEIGHTS, CACHE = ("weights",), ("kv_cache",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    write_model(folder / "model", "llama_gqa")
    for number, name in enumerate(("first", "second"), 1):
        (folder / name).mkdir()
        save_file(tensors(number), folder / name / "model.safetensors")
    return folder


def do(engine: Engine, state: EngineState, folder: Path, *operations: Operation[Any]) -> None:
    for operation in operations:
        if isinstance(operation, LoadWeights):
            operation = LoadWeights(str(folder / operation.folder), operation.version)
        state.note(operation, engine.do(operation))


@pytest.mark.parametrize(
    "operations",
    [
        (SetStrategy("memory"), SetStrategy("throughput"), SetStrategy("memory")),
        (FIRST,),
        (FIRST, LoadWeights("second"), FIRST, SECOND),
        (Pause("abort"), FIRST),
        (Pause("keep"), Resume(), SECOND, Pause("wait"), Sleep(2, "keep"), FIRST),
        (Sleep(),),
        (FIRST, Sleep(1), WakeUp(CACHE)),
        (Sleep(2, "keep", WEIGHTS), WakeUp()),
        (Sleep(2), Sleep(1), WakeUp(CACHE)),
        (Sleep(1), Sleep(2), WakeUp()),
        (FIRST, Sleep(2), WakeUp(WEIGHTS), Pause("keep")),
        (SECOND, Sleep(2), WakeUp(CACHE), FIRST, SetStrategy("memory")),
    ],
    ids=lambda operations: ", ".join(type(each).__name__ for each in operations),
)
def test_it_is_that_of_the_first(folder: Path, operations: tuple[Operation[Any], ...]) -> None:
    first, state = started(folder / "model"), EngineState()
    do(first, state, folder, *operations)
    second = started(folder / "model")
    for operation in state.operations():
        second.do(operation)
    paused, expected = second.do(GetPauseState()), first.do(GetPauseState())
    assert paused == (expected if first.weights.there else expected._replace(version=0))
    assert (second.load.strategy, second.weights.there) == (first.load.strategy, first.weights.there)
    assert second.gate.by_sleep == first.gate.by_sleep
    if first.weights.there and "weights" not in paused.asleep:
        for array, other in zip(parameters(second), parameters(first), strict=True):
            np.testing.assert_array_equal(array, other)
    # both go on with the same
    for engine in first, second:
        if paused.asleep:
            engine.do(WakeUp())
        if not engine.weights.there:
            engine.do(LoadWeights(str(folder / "second"), 7))
        if engine.do(GetPauseState()).paused:
            engine.do(Resume())
    assert said(run(second, WORK)) == said(run(first, WORK))


def test_new_weights_mend_one_whose_folder_is_gone(folder: Path) -> None:
    state = EngineState()
    state.note(LoadWeights(str(folder / "third")), 3)
    engine = started(folder / "model")
    sleep, load = state.operations()
    engine.do(sleep)
    with pytest.raises(ModelError, match="third"):
        engine.do(load)
    assert engine.do(GetPauseState()).paused, "the weights of the start are not those of version 3"
    assert engine.do(UpdateWeights(tensors(1), 4)) == 4 and not engine.do(GetPauseState()).paused
    assert run(engine, WORK)
