"""Kernels compiled for an absent H200: the compiler's report."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiler_report import KernelFacts, kernel_facts
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_facts import (
    CASES,
    COPIES,
    EIGHT_BITS,
    EIGHT_BITS_INTERPRETED,
    FOUR_BITS,
    GROUPED,
    GROUPED_INTERPRETED,
    GROUPED_THREADS,
    INTERPRETED,
    LATENT,
    LATENT_THREADS,
    PREFILL_ALONE,
    PREFILL_CASES,
    PREFILL_INTERPRETED,
    PREFILL_THREADS,
    PREFILL_WIDE,
    ROWS,
    THREADS,
    WRITES,
    Case,
    cache_of,
    prefill,
)

from pallas_kernels.attention import dispatch
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache import dispatch as cache_dispatch
from pallas_kernels.cache.qkv import QkvProduct
from pallas_kernels.compilation.ahead_of_time import device, lower_for
from tests.extras import compiler_for_gpus

compiler_for_gpus()

pytestmark = pytest.mark.usefixtures("optimized")


def some(cases: dict[str, Case], *names: str) -> list[Any]:
    """The others are long tests, since each compiles for seconds."""
    assert {*names} <= {*cases}
    return [
        pytest.param(case, id=name, marks=[] if name in names else [pytest.mark.full])
        for name, case in cases.items()
    ]


def all_compiled_for_h200(case: Case) -> tuple[list[KernelFacts], jax.stages.Compiled]:
    """Kernels that an H200 takes: they fit, their bulk copies begin in shared memory where they must, and
    find there what was written.
    """
    function, args = case
    kernels, compiled = kernel_facts(device("h200"), function, *args)
    for facts in kernels:
        assert facts.shared <= facts.most_shared
        assert facts.misaligned == facts.mixed_up == ()
    return kernels, compiled


def compiled_for_h200(case: Case) -> tuple[KernelFacts, jax.stages.Compiled]:
    """The only one."""
    [facts], compiled = all_compiled_for_h200(case)
    assert facts.bulk_copies > 0
    return facts, compiled


def check_decode(case: Case, pairs: int, spilled: int = 0) -> None:
    """pairs: of warpgroups, that a multiprocessor holds; spilled: bytes at most."""
    facts, compiled = compiled_for_h200(case)
    assert facts.spilled <= spilled
    assert facts.products > 0
    assert facts.blocks(THREADS * pairs) >= 1
    text = compiled.as_text()
    assert text is not None and len(re.findall(r"= .*custom_call_target=\"mosaic_gpu", text)) == 1
    assert not re.search(r"\b(while|conditional|sort)\(", text)  # XLA would wait for the host


@pytest.mark.parametrize("case", some(CASES, "head dim 128, pages of 16, window, cap"))  # others below
def test_a_kernel_spills_nothing_and_fits(case: Case) -> None:
    check_decode(case, pairs=1 if case[1][0].shape[-1] == 256 else 2)


@pytest.mark.parametrize("case", some(EIGHT_BITS, "head dim 64, fp8, pages of 16, window, cap"))
def test_a_kernel_for_eight_bit_caches_spills_no_sums_and_fits(case: Case) -> None:
    head_dim = case[1][0].shape[-1]
    # eight addresses of a result, read once an item
    check_decode(case, pairs=2 if head_dim == 64 else 1, spilled=80 if head_dim == 256 else 0)


@pytest.mark.parametrize("case", some(LATENT, "128 heads"))
def test_the_latent_kernel_spills_at_most_an_address_and_fits(case: Case) -> None:
    facts, compiled = compiled_for_h200(case)
    page_size = case[1][1].shape[2]
    assert facts.spilled <= (0 if page_size >= 64 else 20)  # an address, if a tile is several copies
    assert facts.products > 0 and not facts.serialized
    assert facts.blocks(LATENT_THREADS) == 1
    text = compiled.as_text()
    assert text is not None
    assert not re.search(r"\b(while|conditional|sort)\(", text)  # XLA would wait for the host


def check_prefill(case: Case, threads: int, blocks: int, spilled: int) -> None:
    facts, compiled = compiled_for_h200(case)
    assert facts.spilled <= spilled
    assert facts.products > 0
    assert not facts.serialized
    head_dim = case[1][0].shape[-1]
    # Where registers suffice, a block's scores are issued before the values of the block before are awaited.
    assert facts.in_flight == (2 if threads == PREFILL_THREADS and head_dim <= 128 else 1)
    assert facts.blocks(threads) >= blocks
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and "mosaic_gpu" in text
    assert not re.search(r"\b(while|conditional|sort)\(", text)  # XLA would wait for the host
    assert memory is not None and memory.temp_size_in_bytes < 1 << 20  # fp8's bits are not copied


WIDEST = (  # windows, caps and conversions take registers
    "head dim 256, pages of 16, window, cap",
    "head dim 128, fp8, pages of 16, window, cap",
    "head dim 64, group 8, window, sinks",
)


@pytest.mark.parametrize("case", some(PREFILL_CASES, *WIDEST))
def test_the_prefill_kernel_spills_nothing_and_fits(case: Case) -> None:
    check_prefill(case, PREFILL_THREADS, blocks=1, spilled=0)


@pytest.mark.parametrize("case", some(PREFILL_ALONE, "head dim 128, one head a kv head"))
def test_two_blocks_overlap_where_one_warpgroup_computes(case: Case) -> None:
    check_prefill(case, THREADS, blocks=2, spilled=0)


@pytest.mark.parametrize("case", some(PREFILL_WIDE, *PREFILL_WIDE))
def test_the_prefill_kernel_of_head_dim_256_and_eight_bits_spills_addresses_only(case: Case) -> None:
    check_prefill(case, PREFILL_THREADS, blocks=1, spilled=128)


@pytest.mark.parametrize(("head_dim", "spilled"), [(256, 0), pytest.param(128, 64, marks=pytest.mark.full)])
def test_queries_that_see_later_tokens_spill_little(head_dim: int, spilled: int) -> None:
    """With Gemma 3's heads and window."""
    function, arrays = prefill(head_dim, 64, group=2, window=1024)
    until = jax.ShapeDtypeStruct(arrays[0].shape[:2], jnp.int32)
    case = (lambda *args: function(*args[:-1], until=args[-1])), (*arrays, until)
    check_prefill(case, PREFILL_THREADS, blocks=1, spilled=spilled)


FEW_GROUPED = "64 rows, int8", "8 rows, both fp8, few outputs", "8 rows, both fp8 in blocks, few outputs"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW_GROUPED else [pytest.mark.full]) for name in GROUPED]
)
def test_grouped_products_spill_nothing_and_hide_the_wait_for_weights(name: str) -> None:
    check_grouped(GROUPED[name])


def check_grouped(case: Case) -> None:
    facts, compiled = compiled_for_h200(case)
    assert facts.spilled == 0
    assert facts.products > 0
    x, weight = (next(array for array in case[1] if len(array.shape) == axes) for axes in (2, 3))
    # then a thread block's rows reuse its weights
    many = x.shape[0] > (32 if weight.shape[0] == 1 else 1 << 15)
    assert facts.blocks(GROUPED_THREADS) >= (1 if many else 2)
    text = compiled.as_text()
    assert text is not None and not re.search(r"\b(while|conditional|sort)\(", text)


@pytest.mark.parametrize("case", some(ROWS, *[*ROWS][::2]))
def test_rows_are_quantized_without_spills(case: Case) -> None:
    [facts], compiled = all_compiled_for_h200(case)
    assert facts.spilled == 0
    assert facts.blocks(threads=128) >= 2
    text = compiled.as_text()
    assert text is not None and len(re.findall(r" (?:custom-call|fusion)\(", text)) == 1, (
        "no kernel but this one"
    )


FEW = "8 rows", "8192 rows"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.full]) for name in FOUR_BITS]
)
def test_four_bit_products_spill_nothing_and_never_store_weights_wider(name: str) -> None:
    case = FOUR_BITS[name]
    facts, compiled = compiled_for_h200(case)
    x, weight = case[1][0], case[1][-1]
    assert facts.spilled == 0
    assert facts.products > 0
    assert facts.blocks(GROUPED_THREADS) >= (
        2 if name.startswith("8 rows") or name.startswith("32 rows of experts, M") else 1
    )
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and not re.search(r"\b(while|conditional|sort)\(", text)
    wide = rf"(bf16|f16|f32|s8|s32)\[[\d,]*\b{weight.shape[-2]},{weight.shape[-1]}\]"
    assert not re.search(wide, text), "the weight, unpacked"
    words = weight.values.size * 4
    assert memory is not None and memory.temp_size_in_bytes <= words // 4 + 16 * x.size, (
        "sums of splits, and padded rows"
    )


SHARED_OPERANDS = {
    "decode": INTERPRETED,
    "decode, eight bits": EIGHT_BITS_INTERPRETED,
    "prefill": PREFILL_INTERPRETED,
    "grouped": GROUPED_INTERPRETED,
}
FORMS = {
    f"{kernel}, {name}": case for kernel, cases in SHARED_OPERANDS.items() for name, case in cases.items()
}


@pytest.mark.parametrize("case", some(FORMS, "prefill, head dim 64"))
def test_the_interpreted_form_compiles_too(case: Case) -> None:
    facts, *_ = all_compiled_for_h200(case)[0]
    assert facts.products > 0


MOVES = (
    "64 tokens",
    "64 tokens, normed, rotated in part, head dim 64, int8",
    "4096 tokens, rotated, fp8",
    "pages of 64",
    "pages of 128, fp8",
)


@pytest.mark.parametrize("case", some(WRITES | COPIES, *MOVES))
def test_a_kernel_that_moves_data_spills_nothing_and_leaves_room_for_others(case: Case) -> None:
    facts, _ = compiled_for_h200(case)
    assert facts.spilled == 0
    assert facts.blocks(threads=128) >= 4


@pytest.mark.parametrize(("kind", "layers"), [("", 2), ("int8", 1)])  # each layer's kernels are compiled
def test_a_step_updates_its_cache_in_place_in_its_kernels(kind: str, layers: int) -> None:
    rows, pages, kv_heads, width = 8, 1 << 12, 8, 64
    h200 = device("h200")
    cache = cache_of(kind, (pages, kv_heads, 64, 128))
    q = jax.ShapeDtypeStruct((rows, kv_heads, 6, 128), jnp.bfloat16)
    numbers = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def step(caches: Any, qkv: Any, tables: Any, lengths: Any, rotation: Any) -> Any:
        last = lengths - 1
        where = tables[jnp.arange(rows), last // 64], last % 64
        kernel: Any = {"impl": "mosaic", "device": h200}
        for layer, (k, v) in enumerate(caches):
            k, v = cache_dispatch.copy_pages(k, v, lengths, lengths + rows, **kernel)
            product = QkvProduct(qkv, 4)
            (q, _), (k, v) = cache_dispatch.kv_write(
                k, v, product, *where, rows=rows, rotation=rotation, **kernel
            )
            caches[layer] = k, v
            got = dispatch.paged_attention_decode(q, k, v, tables, lengths, AttentionOptions(0.1), **kernel)
            qkv = qkv.at[:, :, :4].add(got.reshape(rows, kv_heads, 4, 128))
        return caches, qkv

    tables, angles = (
        jax.ShapeDtypeStruct((rows, width), jnp.int32),
        jax.ShapeDtypeStruct((rows, 64), jnp.float32),
    )
    args = [[cache, cache] for _ in range(layers)], q, tables, numbers, (angles, angles)
    compiled = lower_for(h200, step, *args, donate=(0,)).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory is not None and text is not None
    assert memory.alias_size_in_bytes >= 2 * layers * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 10
    assert not re.search(r"\b(while|conditional|scatter)\(", text)


def test_targets_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target='h20': must be one of .*h200"):
        device("h20")


def half_moved(rows: int) -> Case:
    """A kernel that copies [rows, 128] by TMA to shared memory whose layout Mosaic infers, and its last 64
    columns over the first.
    """

    def kernel(x_ref: Any, out_ref: Any, smem: Any, arrived: Any) -> None:
        some = smem.at[pl.ds(0, rows)]
        plgpu.copy_gmem_to_smem(x_ref, some, arrived)
        plgpu.barrier_wait(arrived)
        smem[:, pl.ds(0, 64)] = plgpu.load(smem.at[:, pl.ds(64, 64)], layout=plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(some, out_ref)
        plgpu.wait_smem_to_gmem(0)

    x = jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16)
    return plgpu.kernel(
        kernel,
        out_type=x,
        scratch_types=[plgpu.SMEM((64, 128), x.dtype), plgpu.Barrier()],
        kernel_name="half_moved",
    ), (x,)


@pytest.mark.parametrize("rows", [4, 8])
def test_slices_that_begin_inside_a_swizzle_are_found(rows: int) -> None:
    function, args = half_moved(rows)
    [facts], _ = kernel_facts(device("h200"), function, *args)
    assert facts.swizzled == 2
    assert len(facts.mixed_up) == (rows == 4)
    assert all(
        "vector_load" in access and "tiles (4, 64), begins at a multiple of 512 bytes" in access
        for access in facts.mixed_up
    )
