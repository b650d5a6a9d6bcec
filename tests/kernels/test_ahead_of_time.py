"""Kernels compiled for an H200 that is not there: what the compiler says of them."""

from __future__ import annotations

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from kernel_facts import CASES, INTERPRETED, THREADS, Case

from pallas_kernels import dispatch, xla
from pallas_kernels.ahead_of_time import MAX_SHARED, compile_for, device, kernel_facts

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra aot: pip install '.[aot]'")
if os.environ.get("JAX_PLATFORMS") != "cpu":
    pytest.skip("needs JAX_PLATFORMS=cpu: the plugin looks for all of CUDA otherwise", allow_module_level=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_kernel_spills_nothing_and_fits(case: Case) -> None:
    function, args = case
    [facts], compiled = kernel_facts(device("h200"), function, *args)
    assert facts.spilled == 0
    assert facts.shared <= MAX_SHARED
    assert facts.products > 0
    assert facts.blocks(THREADS) >= (1 if args[0].shape[-1] == 256 else 2)
    text = compiled.as_text()
    assert text is not None and "mosaic_gpu" in text
    assert not re.search(r"\b(while|conditional)\(", text)  # XLA would wait for the host


@pytest.mark.parametrize("case", INTERPRETED.values(), ids=INTERPRETED.keys())
def test_the_interpreted_form_compiles_too(case: Case) -> None:
    function, args = case
    [facts], _ = kernel_facts(device("h200"), function, *args)
    assert facts.shared <= MAX_SHARED
    assert facts.products > 0


def test_a_step_updates_its_cache_in_place_around_the_kernel() -> None:
    rows, pages, kv_heads, layers, width = 8, 1 << 12, 8, 2, 64
    h200 = device("h200")
    cache = jax.ShapeDtypeStruct((pages, kv_heads, 64, 128), jnp.bfloat16)
    q, new = (jax.ShapeDtypeStruct((rows, heads, 128), jnp.bfloat16) for heads in (32, kv_heads))
    numbers = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def step(caches: Any, q: Any, new: Any, tables: Any, lengths: Any) -> Any:
        for layer, (k, v) in enumerate(caches):
            last = lengths - 1
            k, v = caches[layer] = xla.kv_write(k, v, new, new, tables[jnp.arange(rows), last // 64], last % 64)
            q += dispatch.paged_attention_decode(q, k, v, tables, lengths, scale=0.1, impl="mosaic", device=h200)
        return caches, q

    args = [[cache, cache] for _ in range(layers)], q, new, jax.ShapeDtypeStruct((rows, width), jnp.int32), numbers
    compiled = compile_for(h200, step, *args, donate=(0,))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    cache_bytes = pages * kv_heads * 64 * 128 * 2
    assert memory is not None and text is not None
    assert memory.alias_size_in_bytes >= 2 * layers * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 10
    assert not re.search(r"\b(while|conditional)\(", text)


def test_targets_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="target='h20': one of a100, h100, h200"):
        device("h20")
