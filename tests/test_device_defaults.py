"""Sizes that depend on the kind of device."""

from __future__ import annotations

from pathlib import Path

import pytest

from jengine.base.errors import InvalidArgument
from jengine.capacity.planning.ahead_of_time import describe_on
from jengine.capacity.planning.plan import make_plan
from jengine.core.config import EngineConfig
from jengine.devices.device_defaults import CORES, Sizes, sizes
from jengine.parallel.mesh import make_mesh

LLAMA = EngineConfig(model=str(Path(__file__).parent / "data" / "llama-3.1-8b"), dtype="bfloat16")


def test_what_is_given_wins() -> None:
    assert sizes(EngineConfig(), "cpu") == Sizes(32, 512, 16, 2)
    assert sizes(EngineConfig(), "gpu") == Sizes(256, 8192, 64, CORES)
    given = {"max_num_seqs": 7, "max_num_batched_tokens": 99, "page_size": 8, "compile_threads": 3}
    for platform in ("cpu", "gpu"):
        assert sizes(EngineConfig.of("demo", given), platform) == Sizes(**given)
        assert sizes(EngineConfig(max_num_seqs=7), platform).max_num_batched_tokens in (512, 8192)


def test_programs_are_compiled_by_cpu_threads_at_most() -> None:
    assert sizes(EngineConfig(cpu_threads=1), "cpu").compile_threads == 1
    assert sizes(EngineConfig(cpu_threads=99), "cpu").compile_threads == 2
    assert sizes(EngineConfig(cpu_threads=1, compile_threads=3), "cpu").compile_threads == 3, (
        "what is given wins"
    )


def test_the_default_budget_grows_with_the_rows() -> None:
    assert sizes(EngineConfig(max_num_seqs=512), "gpu").max_num_batched_tokens == 8192
    assert sizes(EngineConfig(max_num_seqs=512), "cpu").max_num_batched_tokens == 512 + 64


def test_a_default_that_cannot_be_met_is_named() -> None:
    with pytest.raises(
        InvalidArgument, match=r"max_num_batched_tokens=300: must be at least max_num_seqs \+ tile_size = 320"
    ):
        sizes(EngineConfig(max_num_batched_tokens=300), "gpu")


def test_programs_for_a_gpu_have_a_gpus_sizes() -> None:
    """The programs are those of a plan, made on a machine without a GPU."""
    spec = make_plan(LLAMA, "h200").spec
    table = spec.table
    assert (spec.max_slots, spec.page_size) == (256, 64)
    assert (table.row_buckets, table.mixed_row_buckets) == ((16, 128, 256), (16, 256))
    assert table.tile_buckets == (4, 16, 128)
    assert (len(table.trunks()), len(table.samplers()), len(table.scores())) == (9, 9, 2)


def test_programs_for_a_cpu_have_a_cpus_sizes() -> None:
    spec = describe_on(LLAMA, make_mesh(1))
    assert (spec.max_slots, spec.page_size, spec.table.max_rows, spec.table.max_tiles) == (32, 16, 32, 8)
