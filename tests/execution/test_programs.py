"""XLA's report on every program of a table: memory is updated in place, nothing grows with the cache, and
there are no closures.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.execution.device_state import ALLOCATE
from jengine.execution.kinds.sampler import mask, to_sample
from jengine.execution.memory import ProgramMemory
from jengine.execution.programs import Programs, lower, program_keys
from jengine.execution.spec import ExecutionSpec
from jengine.table.program_table import SamplerKey, TrunkKey
from tests.execution.specs import make_spec, temporaries_bound

MANY = 16384  # pages: one layer's keys alone take more than any program's bound
CASES: list[dict[str, Any]] = [
    {"variant": "llama_gqa"},
    {"variant": "qwen3_tied", "page_buckets": (12,)},
    {"variant": "llama_gqa", "quantization": "int8", "kv_cache_dtype": "int8"},
]
QUANTIZED: list[dict[str, Any]] = [
    {"variant": "llama_gqa", "quantization": "w8a8"},
    {"variant": "mixtral", "quantization": "int8"},
    {"variant": "llama_gqa", "quantization": "fp8", "kv_cache_dtype": "float8_e4m3fn"},
]
OTHERS = [
    "llama_mha", "llama_mqa", "llama_tied", "llama_attention_bias", "llama_mlp_bias", "llama_head_dim",
    "rope_dynamic_beyond", "rope_yarn", "gemma2", "mixtral", "opt_350m", "qwen3_next",
]  # fmt: skip
LARGE = 4096  # bytes of a constant; rotary frequencies are smaller


@pytest.fixture(
    scope="module",
    params=[
        *CASES[1:],
        *(
            pytest.param(case, marks=pytest.mark.full)
            for case in [CASES[0], *QUANTIZED, *({"variant": v} for v in OTHERS)]
        ),
    ],
    ids=lambda case: "-".join(map(str, case.values())),
)
def programs(request: pytest.FixtureRequest) -> tuple[ExecutionSpec, Programs]:
    spec = make_spec(**request.param)
    return spec, Programs(spec, None, threads=2, progress=False)


def nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def arguments(spec: ExecutionSpec, key: TrunkKey | SamplerKey) -> tuple[Any, ...]:
    if isinstance(key, TrunkKey):
        return spec.leaves, spec.cache, spec.slots, spec.packed(key)
    last = spec.slots.last
    if key.variant == "full":
        return spec.leaves, (last, spec.counts), spec.slots.sampling, to_sample(spec, key), mask(spec, key)
    return spec.leaves, last, spec.slots.sampling, to_sample(spec, key)


def test_a_trunk_adds_up_no_constants() -> None:
    """XLA would do so while it compiles, for seconds if there are many tokens, and complain about it."""
    spec = make_spec(variant="llama_gqa")
    key = spec.table.trunks()[-1]
    assert key.tiles and "reduce_window" not in str(lower(spec, key).as_text())


def test_the_whole_table_is_compiled(programs: tuple[ExecutionSpec, Programs]) -> None:
    spec, compiled = programs
    keys = program_keys(spec)
    assert {*spec.table.trunks(), *spec.table.samplers(), *spec.table.scores(), ALLOCATE} < {*keys}
    assert compiled.compiled == len(keys) == len(compiled.memory) and compiled.loaded == 0
    assert all(callable(compiled[key]) for key in keys)


def test_cache_and_slots_are_updated_in_place(programs: tuple[ExecutionSpec, Programs]) -> None:
    spec, compiled = programs
    for key in spec.table.trunks():
        assert compiled.memory[key].aliased >= nbytes(spec.cache) + nbytes(spec.slots), key
    for sampler in spec.table.samplers():
        counts = nbytes(spec.counts) if sampler.variant == "full" else 0
        assert compiled.memory[sampler].aliased >= nbytes(spec.slots.last) + counts, sampler


@pytest.mark.parametrize(
    "case", [case if case == CASES[0] else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)
def test_a_burst_copies_no_cache(case: dict[str, Any]) -> None:
    """Neither the burst nor its steps copy it: the cache is the carry of a loop, updated in place."""
    spec = make_spec(**case, num_pages=MANY)
    spec = dataclasses.replace(spec, table=dataclasses.replace(spec.table, steps=8))
    for key in spec.table.bursts():
        compiled = lower(spec, key).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= nbytes(spec.cache) + nbytes(spec.slots), key
        assert memory.temp_size_in_bytes <= temporaries_bound(spec, key.trunk) + temporaries_bound(
            spec, key.sampler
        ), key


@pytest.mark.parametrize(
    "case",
    [
        {"variant": "llama_gqa", "draft": "gpt2"},
        {"variant": "mimo", "draft": "mimo_mtp"},
        pytest.param(
            {"variant": "gemma3", "draft": "llama_gqa", "kv_cache_dtype": "int8"}, marks=pytest.mark.full
        ),
    ],
)
def test_a_draft_model_copies_no_cache(case: dict[str, Any]) -> None:
    """Neither its program nor the trunks that it follows: both update both models' pages in place."""
    spec = make_spec(**case, num_pages=MANY)
    for key in (*spec.table.draft_keys(), *spec.table.trunks()):
        memory = lower(spec, key).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= nbytes(spec.cache) + nbytes(spec.slots), key
        bound = temporaries_bound(spec, key)
        assert memory.temp_size_in_bytes <= bound < spec.cache_bytes // 4, key


def test_temporaries_do_not_grow_with_the_cache(
    programs: tuple[ExecutionSpec, Programs], request: pytest.FixtureRequest
) -> None:
    spec, compiled = programs
    for key in (*spec.table.trunks(), *spec.table.samplers()):
        assert compiled.memory[key].temporaries <= temporaries_bound(spec, key), key
    many = make_spec(**request.node.callspec.params["programs"], num_pages=MANY)
    layers = many.model.config.num_layers
    for key in many.table.trunks():
        bound = temporaries_bound(many, key)
        assert bound == temporaries_bound(spec, key), "the bound grows with num_pages"
        assert bound < many.cache_bytes // layers // 2, "the bound would let a copy of a layer's keys pass"
        memory = lower(many, key).compile().memory_analysis()
        assert memory.temp_size_in_bytes == compiled.memory[key].temporaries, key


def test_a_sampler_does_not_know_the_cache() -> None:
    few, many = make_spec(num_pages=64), make_spec(num_pages=MANY)
    for key in few.table.samplers():
        assert lower(few, key).as_text() == lower(many, key).as_text()


@pytest.mark.parametrize("option", [jax.default_prng_impl("unsafe_rbg"), jax.threefry_partitionable(False)])
def test_random_numbers_do_not_depend_on_the_options_of_the_process(option: Any) -> None:
    """Under unsafe_rbg, a row's number would depend on its place in the batch."""
    spec = make_spec()
    for key in (key for key in spec.table.samplers() if key.variant != "greedy"):
        expected = lower(spec, key).as_text()
        with option:
            assert lower(spec, key).as_text() == expected


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("jax_enable_x64", True),
        ("jax_default_matmul_precision", "float32"),
        ("jax_numpy_dtype_promotion", "strict"),
    ],
)
def test_options_of_jax_that_change_programs_are_part_of_their_identity(option: str, value: object) -> None:
    spec, before = make_spec(), jax.config.values[option]
    identity, fingerprint = spec.identity(), spec.fingerprint()
    jax.config.update(option, value)
    try:
        assert spec.identity() == {**identity, option: value} and spec.fingerprint() != fingerprint
    finally:
        jax.config.update(option, before)
    assert spec.identity() == identity and option not in identity


def test_nothing_is_closed_over(programs: tuple[ExecutionSpec, Programs]) -> None:
    spec, compiled = programs
    for key in (*spec.table.trunks(), *spec.table.samplers()):
        assert largest_constant(lower(spec, key)) <= LARGE, key
        # An array that is closed over may also become one more argument.
        assert compiled.memory[key].arguments <= nbytes(arguments(spec, key)), key


def test_an_array_that_is_closed_over_is_noticed() -> None:
    table = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
    lowered = jax.jit(lambda x: x @ table).lower(jax.ShapeDtypeStruct((64,), jnp.float32))
    extra = lowered.compile().memory_analysis().argument_size_in_bytes > 64 * 4
    assert largest_constant(lowered) > LARGE or extra


def test_a_copy_of_the_cache_is_noticed() -> None:
    """Aliasing alone would not show it: the copy is a temporary."""
    spec = make_spec(num_pages=MANY)

    def wasteful(cache: Any) -> Any:
        copies = jax.lax.optimization_barrier([(k + 1, v) for k, v in cache[0]])
        return [
            [
                (k.at[0].set(copy[1:2, :, :, :].sum(0)), v)
                for (k, v), (copy, _) in zip(cache[0], copies, strict=True)
            ]
        ]

    memory = jax.jit(wasteful, donate_argnums=0).lower(spec.cache).compile().memory_analysis()
    assert memory.temp_size_in_bytes > max(temporaries_bound(spec, key) for key in spec.table.trunks())


def test_allocate_makes_the_cache_and_the_slots(programs: tuple[ExecutionSpec, Programs]) -> None:
    spec, compiled = programs
    cache, slots = compiled[ALLOCATE]()
    for made, wanted in ((cache, spec.cache), (slots, spec.slots)):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
            lambda x: (x.shape, x.dtype), wanted
        )
        assert all(not np.asarray(x).any() for x in jax.tree.leaves(made))


def test_memory_is_reported_in_bytes(programs: tuple[ExecutionSpec, Programs]) -> None:
    spec, compiled = programs
    for key in program_keys(spec):
        memory = compiled.memory[key]
        assert isinstance(memory, ProgramMemory)
        if isinstance(key, TrunkKey):
            assert memory.arguments >= nbytes(spec.cache) and memory.outputs >= memory.aliased


def largest_constant(lowered: jax.stages.Lowered) -> int:
    """Bytes of the largest constant in a program's text that is not one value repeated."""
    sizes = [0]
    for value, shape, kind in re.findall(
        r"constant dense<(.+?)> : tensor<((?:\d+x)*)\w*?(\d+)>", lowered.as_text()
    ):
        if value.startswith(("[", '"')):
            sizes.append(int(np.prod([int(n) for n in shape.split("x") if n])) * int(kind) // 8)
    return max(sizes)
