"""Kernels compiled for an absent H200: the compiler's report."""

from __future__ import annotations

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from kernel_facts import (
    CASES,
    COPIES,
    EIGHT_BITS,
    EIGHT_BITS_INTERPRETED,
    GROUPED,
    GROUPED_INTERPRETED,
    GROUPED_THREADS,
    INTERPRETED,
    PREFILL_ALONE,
    PREFILL_CASES,
    PREFILL_INTERPRETED,
    PREFILL_THREADS,
    PREFILL_WIDE,
    THREADS,
    WRITES,
    Case,
    cache_of,
)

from pallas_kernels import dispatch
from pallas_kernels.ahead_of_time import KernelFacts, compile_for, device, kernel_facts

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra aot: pip install '.[aot]'")
if os.environ.get("JAX_PLATFORMS") != "cpu":
    pytest.skip("needs JAX_PLATFORMS=cpu: the plugin looks for all of CUDA otherwise", allow_module_level=True)


def every_second(cases: dict[str, Case]) -> list[Any]:
    """The other half are long tests, since each compiles for seconds."""
    return [pytest.param(case, id=name, marks=[pytest.mark.full] if index % 2 else []) for index, (name, case) in enumerate(cases.items())]


def compiled_for_h200(case: Case) -> tuple[KernelFacts, jax.stages.Compiled]:
    """Checks that an H200 accepts a kernel: it fits, and its bulk copies are aligned in shared memory."""
    function, args = case
    [facts], compiled = kernel_facts(device("h200"), function, *args)
    assert facts.shared <= facts.most_shared
    assert facts.bulk_copies > 0 and facts.misaligned == ()
    return facts, compiled


@pytest.mark.parametrize("case", every_second(CASES))
def test_a_kernel_spills_nothing_and_fits(case: Case) -> None:
    facts, compiled = compiled_for_h200(case)
    assert facts.spilled == 0
    assert facts.products > 0
    assert facts.blocks(THREADS) >= (1 if case[1][0].shape[-1] == 256 else 2)
    text = compiled.as_text()
    assert text is not None and "mosaic_gpu" in text
    assert not re.search(r"\b(while|conditional)\(", text)  # XLA would wait for the host


@pytest.mark.parametrize("case", every_second(EIGHT_BITS))
def test_a_kernel_for_eight_bit_caches_spills_nothing_and_fits(case: Case) -> None:
    facts, _ = compiled_for_h200(case)
    assert facts.spilled == 0
    assert facts.products > 0
    assert facts.blocks(THREADS) >= (2 if case[1][0].shape[-1] == 64 else 1)


def check_prefill(case: Case, threads: int, blocks: int, spilled: int) -> None:
    facts, compiled = compiled_for_h200(case)
    assert facts.spilled <= spilled
    assert facts.products > 0
    assert facts.blocks(threads) >= blocks
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and "mosaic_gpu" in text
    assert not re.search(r"\b(while|conditional|sort)\(", text)  # XLA would wait for the host
    assert memory is not None and memory.temp_size_in_bytes < 1 << 20  # fp8's bits are not copied


@pytest.mark.parametrize("case", every_second(PREFILL_CASES))
def test_the_prefill_kernel_spills_nothing_and_fits(case: Case) -> None:
    check_prefill(case, PREFILL_THREADS, blocks=1, spilled=0)


def test_two_blocks_overlap_where_one_warpgroup_computes() -> None:
    for case in PREFILL_ALONE.values():
        check_prefill(case, THREADS, blocks=2, spilled=0)


def test_the_prefill_kernel_of_head_dim_256_and_eight_bits_spills_addresses_only() -> None:
    for case in PREFILL_WIDE.values():
        check_prefill(case, PREFILL_THREADS, blocks=1, spilled=128)


@pytest.mark.parametrize("case", every_second({name: GROUPED[name] for name in ("64 rows, int8", "2048 rows")}))
def test_few_grouped_rows_spill_nothing_and_hide_the_wait_for_weights(case: Case) -> None:
    check_grouped(case)


@pytest.mark.full
@pytest.mark.parametrize("case", GROUPED.values(), ids=GROUPED)
def test_grouped_products_spill_nothing_and_hide_the_wait_for_weights(case: Case) -> None:
    check_grouped(case)


def check_grouped(case: Case) -> None:
    facts, compiled = compiled_for_h200(case)
    assert facts.spilled == 0
    assert facts.products > 0
    rows = case[1][0].shape[0]
    assert facts.blocks(GROUPED_THREADS) >= (1 if rows > 1 << 15 else 2)
    text = compiled.as_text()
    assert text is not None and not re.search(r"\b(while|conditional|sort)\(", text)


SHARED_OPERANDS = {
    "decode": INTERPRETED,
    "decode, eight bits": EIGHT_BITS_INTERPRETED,
    "prefill": PREFILL_INTERPRETED,
    "grouped": GROUPED_INTERPRETED,
}
FORMS = {f"{kernel}, {name}": case for kernel, cases in SHARED_OPERANDS.items() for name, case in cases.items()}


@pytest.mark.parametrize("case", every_second(FORMS))
def test_the_interpreted_form_compiles_too(case: Case) -> None:
    facts, _ = compiled_for_h200(case)
    assert facts.products > 0


@pytest.mark.parametrize("case", every_second(WRITES | COPIES))
def test_a_kernel_that_moves_data_spills_nothing_and_leaves_room_for_others(case: Case) -> None:
    facts, _ = compiled_for_h200(case)
    assert facts.spilled == 0
    assert facts.blocks(threads=128) >= 4


@pytest.mark.parametrize("kind", ["", "int8"])
def test_a_step_updates_its_cache_in_place_in_its_kernels(kind: str) -> None:
    rows, pages, kv_heads, layers, width = 8, 1 << 12, 8, 2, 64
    h200 = device("h200")
    cache = cache_of(kind, (pages, kv_heads, 64, 128))
    q, new = (jax.ShapeDtypeStruct((rows, heads, 128), jnp.bfloat16) for heads in (32, kv_heads))
    numbers = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def step(caches: Any, q: Any, new: Any, tables: Any, lengths: Any, rotation: Any) -> Any:
        last = lengths - 1
        where = tables[jnp.arange(rows), last // 64], last % 64
        kernel: Any = {"impl": "mosaic", "device": h200}
        for layer, (k, v) in enumerate(caches):
            k, v = dispatch.copy_pages(k, v, lengths, lengths + rows, **kernel)
            k, v = caches[layer] = dispatch.kv_write(k, v, new, new, *where, rotation=rotation, **kernel)
            q += dispatch.paged_attention_decode(q, k, v, tables, lengths, scale=0.1, **kernel)
        return caches, q

    tables, angles = jax.ShapeDtypeStruct((rows, width), jnp.int32), jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    args = [[cache, cache] for _ in range(layers)], q, new, tables, numbers, (angles, angles)
    compiled = compile_for(h200, step, *args, donate=(0,))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory is not None and text is not None
    assert memory.alias_size_in_bytes >= 2 * layers * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 10
    assert not re.search(r"\b(while|conditional|scatter)\(", text)


def test_targets_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target='h20': must be one of .*h200"):
        device("h20")
