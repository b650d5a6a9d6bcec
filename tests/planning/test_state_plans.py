"""A plan of a model with recurrent states, from its configuration alone, checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from jengine.base.errors import InvalidArgument, OutOfMemory
from jengine.capacity.planning.plan import make_plan
from jengine.capacity.planning.report import report
from jengine.capacity.simulation.setup import Setup
from jengine.core.config import EngineConfig
from jengine.engine.setup.shapes import describe_engine
from jengine.execution.memory import pages_that_fit
from jengine.scheduling.costs.step_costs import StepCosts
from tests.golden.weights import write_model

MODEL = str(Path(__file__).parent.parent / "data" / "qwen3.6-35b-a3b")


def test_qwen3_6_35b_a3b_on_an_h200_by_hand() -> None:
    """40 layers, of which 10 attend and 30 have a state; each has 256 experts and a shared one."""
    plan = make_plan(EngineConfig(model=MODEL), "h200", progress=False)
    memory, spec = plan.memory, plan.spec
    # without 64 numbers of float32
    delta_net = 2048 * (2 * 16 * 128 + 2 * 32 * 128) + 2048 * 64 + 32 * 128 * 2048 + 8192 * 4 + 128
    attention = 2048 * (2 * 16 * 256 + 2 * 2 * 256) + 16 * 256 * 2048 + 2 * 256
    experts = 2048 * 256 + (256 + 1) * 3 * 512 * 2048 + 2048
    elements = 30 * delta_net + 10 * attention + 40 * (experts + 2 * 2048) + 2 * 248_320 * 2048 + 2048
    assert elements + 30 * 64 == 34_660_610_688, "as published: 35B"
    assert memory.weights == 2 * elements + 4 * 30 * 64
    assert memory.page == 64 * 10 * 2 * 2 * 256 * 2 == 64 * plan.roofline.formats.kv_bytes
    assert spec.state_bytes == 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 4) == 65_863_680
    assert spec.num_states == 1 + 256 + 64 and memory.states == 321 * 65_863_680
    free = memory.limit - memory.limit // 50 - memory.weights - memory.states - memory.state - memory.working
    assert plan.fits and plan.pages == free // memory.page // 64 * 64
    one = next(rate for rate in plan.decode if (rate.count, rate.context) == (1, 1024))
    met = 2 * (
        30 * delta_net + 10 * attention + 40 * (2048 * 256 + 9 * 3 * 512 * 2048 + 2048) + 248_320 * 2048
    )
    bytes_read = met + 1024 * plan.roofline.formats.kv_bytes + 2 * spec.state_bytes
    assert one.seconds == pytest.approx(bytes_read / (0.70 * plan.device.bandwidth), rel=1e-3), (
        "norms are not counted"
    )
    assert "recurrent states" in report("Qwen3.6-35B-A3B", plan)


def test_drafts_on_a_gpu_have_states_if_they_are_asked_for() -> None:
    how = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    spec = make_plan(EngineConfig.of(MODEL, how), "h200", progress=False).spec
    assert (spec.num_states, spec.draft_states) == (1 + 256 + 64 + 32, 32)


def test_eight_devices_share_the_heads_of_the_states() -> None:
    plan = make_plan(EngineConfig(model=MODEL, tensor_parallel_size=8), "h200", progress=False)
    assert plan.spec.state_bytes == 65_863_680 // 8
    assert plan.memory.page == 64 * 10 * 2 * 1 * 256 * 2, (
        "a kv head is not divided: each of the two lies on four devices"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"swap_space": 1.0},
            "^swap_space=1.0: must be 0: this model's recurrent states are not kept on the host",
        ),
        (
            {"calibration_data": "text", "quantization": "int4"},
            "^calibration_data=.*recurrent states cannot be calibrated",
        ),
        (
            {"batch_invariant": True, "speculative_config": {"method": "suffix"}},
            "^speculative_config=.*: must be none with batch_invariant: a GPU computes the states",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make_plan(EngineConfig.of(MODEL, options), "h200", progress=False)


def test_simulations_have_as_many_states_as_engines(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_next")
    config = EngineConfig(model=str(tmp_path), dtype="float32", max_num_seqs=4)
    spec = describe_engine(config)[1]
    shape = Setup(config, spec, StepCosts(spec.table)).shape(max_num_seqs=64)
    assert spec.num_states == 1 + 4 + 16 + 16 and shape.cache.num_states == 1 + 64 + 16 + 16
    assert spec.draft_states == shape.cache.draft_states == 16
    shape = Setup(config, spec, StepCosts(spec.table)).shape(max_num_seqs=256, speculative_config="none")
    assert (shape.cache.num_states, shape.cache.draft_states) == (1 + 256 + 64, 0)
    assert [*shape.cache.windows] == [None]


def test_a_cache_without_room_names_the_states(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_next")
    config = EngineConfig(model=str(tmp_path), dtype="float32", kv_cache_memory="100KB", max_num_seqs=4)
    with pytest.raises(
        OutOfMemory, match=r"beside 37 recurrent states of .* MiB; a lower max_num_seqs needs fewer"
    ):
        pages_that_fit(config, describe_engine(config)[1])
