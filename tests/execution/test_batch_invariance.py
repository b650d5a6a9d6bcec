"""Programs for batch invariance: which exist, where it is rejected, and that rows of a sampler are
independent.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jengine.base.errors import InvalidArgument
from jengine.capacity.planning.memory import TargetDevice
from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.core.scheduling_options import SchedulingOptions
from jengine.engine.setup.shapes import describe
from jengine.execution.batch import BatchLayout
from jengine.execution.kernels import product_forms
from jengine.execution.logits import ALL_ALLOWED, mask_words
from jengine.execution.sampler import sample, with_wanted_logprobs
from jengine.execution.sampling_row import sampling_of
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.collectives import TENSOR, all_reduce
from jengine.parallel.mesh import make_mesh
from jengine.scheduling.step_plan import Span, StepPlan
from jengine.table.program_table import ProgramTable, TrunkKey
from pallas_kernels.devices import batch_invariant
from pallas_kernels.products import choice
from tests.execution.test_sampler import GREEDY_ROW, Row, stacked
from tests.golden.weights import VARIANTS

pytestmark = pytest.mark.usefixtures("optimized")
ROWS, VOCAB = 8, 301


def described(
    capability: str | None, devices: int = 1, variant: str = "llama_gqa", **options: Any
) -> ExecutionSpec:
    """For GPUs of this compute capability, or for the CPU."""
    model = model_config({**VARIANTS[variant], "head_dim": 64})
    config = EngineConfig.of(
        "MODEL", {"batch_invariant": True, "max_model_len": 192, "tensor_parallel_size": devices, **options}
    )
    if capability is None:
        return describe(config, model, make_mesh(devices), Path())
    stand_ins = np.array([TargetDevice(i, "GPU", capability) for i in range(devices)], object)
    mesh = jax.sharding.Mesh(stand_ins, (TENSOR,), axis_types=(jax.sharding.AxisType.Auto,))
    return describe(dataclasses.replace(config, dtype="bfloat16"), model, mesh, Path())


def test_one_program_of_each_kind() -> None:
    def sizes(spec: ExecutionSpec) -> tuple[tuple[int, ...], ...]:
        assert (
            spec.table.batch_invariant and len(spec.table.trunks()) == 2 and len(spec.table.samplers()) == 1
        )
        return spec.table.row_buckets, spec.table.tile_buckets, spec.table.page_buckets

    assert sizes(described(None)) == ((32,), (1,), (0,))
    assert sizes(described(None, tile_size=16, max_num_seqs=3)) == ((8,), (4,), (0,))
    assert sizes(described(None, tile_size=128)) == ((32,), (1,), (0,))
    assert sizes(described("9.0")) == ((256,), (16,), (0,))
    assert sizes(described("9.0", max_num_seqs=8, max_num_batched_tokens=136)) == ((8,), (2,), (0,))
    assert sizes(described("7.5")) == ((256,), (16,), (3,)), (
        "XLA's attention reads as many pages of each sequence"
    )


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (
            {"capability": "9.0", "variant": "mixtral"},
            r"mixtral has experts, whose products XLA may sum by an expert's number of rows \(out=96: ",
        ),
        ({"capability": None, "dtype": "float16"}, r"dtype=float16"),
    ],
)
def test_what_cannot_keep_it_is_refused(where: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=f"batch_invariant.*{reason}"):
        described(**where)
    if where.get("devices") == 4:
        described(**{**where, "devices": 2})


@pytest.mark.parametrize("strategy", ["latency", "auto"])
def test_it_does_not_go_with_targets(strategy: str) -> None:
    """They need steps with rows and prompts."""
    with pytest.raises(InvalidArgument, match=f"batch_invariant=True: not with strategy={strategy}"):
        EngineConfig.of("demo", {"batch_invariant": True, "strategy": strategy})
    assert strategy not in SchedulingOptions(batch_invariant=True).strategies


@pytest.mark.parametrize("devices", [2, 4])
def test_a_sum_over_many_devices_has_one_order(devices: int) -> None:
    kind = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((devices,), (TENSOR,), axis_types=kind)
    summed = jax.shard_map(all_reduce, mesh=mesh, in_specs=P(TENSOR), out_specs=P(), check_vma=False)
    x = jax.ShapeDtypeStruct((devices * 3,), np.float32)
    plain = str(jax.make_jaxpr(summed)(x))
    with batch_invariant():
        ordered = str(jax.make_jaxpr(lambda x: summed(x))(x))
    assert "psum" in plain and "all_gather" not in plain
    assert ("psum" in ordered, "all_gather" in ordered) == (devices == 2, devices > 2)


def test_products_take_no_form_that_sums_a_row_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_fastest", lambda able, *_: able[-1])
    assert "xla" in product_forms(described(None, batch_invariant=False), tmp_path).values()
    assert {*product_forms(described(None), tmp_path).values()} <= {"kernel", "amx"}


def test_rows_that_repeat_take_their_tokens_from_the_batch() -> None:
    table = ProgramTable.build_batch_invariant(max_num_seqs=8, tiles=1, tile_size=16)
    plan = StepPlan(
        TrunkKey(8, 0), table.samplers()[0], [Span(1, 1, 5), Span(2, 2, 7, known=0), Span(3, 3, 9, known=42)]
    )
    layout = BatchLayout.of(plan.trunk, table, page_size=16, groups=1)
    batch = layout.unpack(jax.numpy.asarray(layout.pack(plan)))
    assert batch.row_tokens.tolist()[:3] == [-1, 0, 42]


def test_a_samplers_row_does_not_see_where_it_is_nor_what_is_beside_it() -> None:
    """Each of these rows gets a bit-identical result at every index, with padding or with all the others."""
    common: dict[str, Any] = {"logprobs": 3}
    rows = [
        GREEDY_ROW,
        Row(SamplingParams(**common, temperature=0.7), seed=1),
        Row(SamplingParams(**common, top_k=9, top_p=0.8), seed=2),
        Row(SamplingParams(**common, min_p=0.05, frequency_penalty=0.7), seed=3),
        Row(SamplingParams(**common, temperature=1.3, repetition_penalty=1.4, logit_bias={3: 1.5}), seed=4),
        Row(SamplingParams(**common, temperature=0.0, min_tokens=9), stops=(7,)),
    ]
    rng = np.random.default_rng(0)
    logits, seen = (
        rng.normal(0, 3, (len(rows), VOCAB)).astype(np.float32),
        rng.integers(0, 4, (len(rows), VOCAB)).astype(np.int32),
    )
    every_mask = np.full((len(rows), mask_words(VOCAB)), ALL_ALLOWED)
    every_mask[1, 2] = 12345

    @jax.jit
    def program(
        logits: jax.Array, words: jax.Array, positions: jax.Array, counts: jax.Array, mask: jax.Array
    ) -> Any:
        tokens = sample(logits, sampling_of(words), positions, "full", lambda: counts, mask)
        return tokens, with_wanted_logprobs(logits, tokens, sampling_of(words))

    def bits(places: dict[int, int]) -> dict[int, list[bytes]]:
        """The bits of the rows at these places."""
        words, positions = (np.zeros((ROWS, *x.shape[1:]), x.dtype) for x in map(np.asarray, stacked(rows)))
        given = (
            np.zeros((ROWS, VOCAB), np.float32),
            np.zeros((ROWS, VOCAB), np.int32),
            np.full((ROWS, mask_words(VOCAB)), ALL_ALLOWED),
        )
        for place, row in places.items():
            words[place], positions[place] = (np.asarray(x)[row] for x in stacked(rows))
            for target, source in zip(given, (logits, seen, every_mask), strict=True):
                target[place] = source[row]
        out = jax.tree.leaves(program(given[0], words, positions, given[1], given[2]))
        return {row: [np.asarray(x)[place].tobytes() for x in out] for place, row in places.items()}

    for row in range(len(rows)):
        alone = bits({0: row})[row]
        if rows[row].params.logprobs is None:
            alone = alone[:1]
        for place in range(1, ROWS):
            assert bits({place: row})[row][: len(alone)] == alone
        for shift in range(ROWS):
            together = bits({(other + shift) % ROWS: other for other in range(len(rows))})
            assert together[row][: len(alone)] == alone, (row, shift)
