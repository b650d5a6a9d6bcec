"""The launches of samplers compiled for an absent GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jengine.execution.logits import mask_words
from jengine.execution.programs import UNTUNED
from jengine.execution.sampler import sample, with_wanted_logprobs
from jengine.execution.sampling_row import SAMPLING_WORDS, sampling_of
from jengine.table.program_table import Variant
from pallas_kernels.compilation import ahead_of_time
from pallas_kernels.products.weights import product
from tests.compiling import compiled_with_thunks
from tests.execution.thunks import leaves
from tests.extras import compiler_for_gpus

compiler_for_gpus()

pytestmark = pytest.mark.usefixtures("optimized")

ROWS, VOCAB = 8, 128256
LAUNCHES = 12  # of a sampler; a command buffer is one
# in command buffers and beside them; with `truncated`, one is for rows of NaN, which sample an allowed token
KERNELS = {"greedy": 4, "sample": 13, "truncated": 72, "full": 90}
# these are compiled: passes of a search share theirs
DIFFERENT = {"greedy": 4, "sample": 13, "truncated": 35, "full": 50}


def sampler(variant: Variant) -> Callable[..., Any]:
    def run(
        logits: jax.Array, words: jax.Array, positions: jax.Array, counts: jax.Array, mask: jax.Array
    ) -> Any:
        sampling = sampling_of(words)
        if variant != "full":
            return sample(logits, sampling, positions, variant)
        tokens = sample(logits, sampling, positions, variant, lambda: counts, mask)
        return with_wanted_logprobs(logits, tokens, sampling)

    return run


@pytest.mark.parametrize(
    "variant",
    ["greedy", *(pytest.param(name, marks=pytest.mark.full) for name in ("sample", "truncated")), "full"],
)
def test_a_sampler_is_few_launches_without_loops_and_branches(variant: Variant) -> None:
    """XLA would wait for the host at each of these."""
    h200 = ahead_of_time.device("h200")
    shapes = [
        ((ROWS, VOCAB), jnp.float32),
        ((ROWS, SAMPLING_WORDS), jnp.int32),
        ((ROWS,), jnp.int32),
        ((ROWS, VOCAB), jnp.int32),
        ((ROWS, mask_words(VOCAB)), jnp.uint32),
    ]
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(h200)) for shape, dtype in shapes
    ]
    with jax.default_device(h200):
        lowered = jax.jit(sampler(variant)).lower(*args)
    compiled, thunks = compiled_with_thunks(lowered, UNTUNED)
    text = compiled.as_text()
    assert text is not None and not re.search(r" (while|conditional)\(", text)
    assert len(thunks) <= LAUNCHES
    assert len(leaves(thunks)) <= KERNELS[variant]
    assert len({thunk.name for thunk in leaves(thunks)}) <= DIFFERENT[variant]
    sorts = [thunk for thunk in leaves(thunks) if "sort" in thunk.name]
    assert all(thunk.blocks <= ROWS for thunk in sorts), (
        "of a row's few candidates: a vocabulary would take many blocks"
    )


def test_a_head_is_not_converted_for_a_single_row() -> None:
    h200 = ahead_of_time.device("h200")
    x, head = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(h200))
        for shape in ((1, 512), (VOCAB, 512))
    )
    with jax.default_device(h200):
        compiled = jax.jit(lambda x, head: product(x, head, jnp.float32)).lower(x, head).compile(UNTUNED)
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < head.size * 2
