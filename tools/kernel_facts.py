"""Print the compiler's facts about each kernel for Hopper, compiled for a GPU that need not be here.

JAX_PLATFORMS=cpu python tools/kernel_facts.py  # with the extra `aot`
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from compiler_report import KernelFacts, kernel_facts

from pallas_kernels.attention import dispatch
from pallas_kernels.attention.hopper.decode import paged_attention_decode
from pallas_kernels.attention.hopper.latent import latent_attention_decode
from pallas_kernels.attention.hopper.prefill import paged_attention_prefill
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.hopper_write import kv_write
from pallas_kernels.cache.page_copy import copy_pages
from pallas_kernels.cache.qkv import HeadNorm, QkvProduct
from pallas_kernels.compilation.ahead_of_time import device
from pallas_kernels.products.groups import grouped, one_group
from pallas_kernels.products.hopper.grouped_product import grouped_product
from pallas_kernels.products.hopper.int4_product import grouped_int4_product, int4_product
from pallas_kernels.products.hopper.quantize_rows import Norm, quantize_rows
from pallas_kernels.quantization.int4 import pack
from pallas_kernels.quantization.quantized import Pages, movable, quantize

Case = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments, jax.ShapeDtypeStruct
ALL = {"window": 1024, "soft_cap": 30.0}
THREADS = 256  # per block
E4M3 = "float8_e4m3fn"


def _last_as_sinks(function: partial[Any], *args: Any) -> Any:
    return function(*args[:-1], options=replace(function.keywords["options"], sinks=args[-1]))


def with_sinks(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Case:
    """The same case with attention sinks."""
    heads = jax.ShapeDtypeStruct((arrays[0].shape[-2],), jnp.float32)
    return partial(_last_as_sinks, function), (*arrays, heads)


def decode(
    head_dim: int,
    page_size: int,
    *,
    rows: int = 16,
    group: int = 4,
    dtype: Any = jnp.bfloat16,
    in_registers: bool = True,
    **ways: Any,
) -> Case:
    """Rows of up to 4096 tokens and eight kv heads. Several rows may be of one sequence."""
    kv_heads, pages = 8, 1 << 10
    cache = jax.ShapeDtypeStruct((pages, kv_heads, page_size, head_dim), dtype)
    q = jax.ShapeDtypeStruct((rows, kv_heads * group, head_dim), dtype)
    tables, lengths = (
        jax.ShapeDtypeStruct((rows, 4096 // page_size), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    function = partial(
        _decode, options=AttentionOptions(head_dim**-0.5, **ways), operand_in_registers=in_registers
    )
    return function, (q, cache, cache, tables, lengths, lengths)


def _decode(*args: Any, options: AttentionOptions, **how: Any) -> jax.Array:
    """Decode attention of queries, pages, tables, lengths and owners."""
    q, k_pages, *_, lengths, owners = args
    where = {"tokens": 4096, "heads": q.shape[1], "window": options.window, "device": device("h200")}
    work = dispatch.decode_work(k_pages, lengths, owners=owners, **where)
    return paged_attention_decode(*args[:-1], options, work=work, **how)


CASES: dict[str, Case] = {
    "head dim 64": decode(64, 64),
    "head dim 128": decode(128, 64),
    "head dim 256": decode(256, 64),
    "head dim 128, 256 rows": decode(128, 64, rows=256),
    "head dim 128, one row": decode(128, 64, rows=1),
    "head dim 128, group 16": decode(128, 64, group=16),
    "head dim 128, group 8, float16": decode(128, 64, group=8, dtype=jnp.float16),
    "head dim 64, pages of 16, window, cap": decode(64, 16, **ALL),
    "head dim 128, pages of 16, window, cap": decode(128, 16, **ALL),
    "head dim 256, pages of 16, window, cap": decode(256, 16, **ALL),
    "head dim 128, pages of 128, one head": decode(128, 128, group=1),
    "head dim 64, group 8, window, sinks": with_sinks(*decode(64, 64, group=8, window=128)),
}
# 128 does not fit
INTERPRETED: dict[str, Case] = {
    f"head dim {size}": decode(size, 64, in_registers=False) for size in (64, 256)
}


def cache_of(kind: str, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Pages:
    """Pages of a 16-bit dtype, or quantized to an 8-bit one if `kind` is given."""
    plain = jax.ShapeDtypeStruct(shape, dtype)
    return jax.eval_shape(lambda x: movable(quantize(x, kind)), plain) if kind else plain  # type: ignore[return-value]


def _last_as_rotation(kernel: Callable[..., Any], rows: int, *args: Any) -> Any:
    return kernel(*args[:-1], rows=rows, rotation=args[-1])


def write(
    tokens: int,
    head_dim: int,
    kind: str = "",
    *,
    pairs: int = 0,
    group: int = 4,
    normed: bool = False,
    kernel: Callable[..., Any] = kv_write,
) -> Case:
    """Tokens of eight kv heads."""
    pages = cache_of(kind, (1 << 10, 8, 64, head_dim))
    where = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    angles = jax.ShapeDtypeStruct((tokens, pairs), jnp.float32)
    weight = jax.ShapeDtypeStruct((head_dim,), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((tokens, 8, group + 2, head_dim), jnp.bfloat16)
    qkv: Any = QkvProduct(rows, group, HeadNorm(weight, weight, 1e-6) if normed else None)  # type: ignore[arg-type]
    rotation = (angles, angles) if pairs else None
    return partial(_last_as_rotation, kernel, tokens - tokens % 64), (
        pages,
        pages,
        qkv,
        where,
        where,
        rotation,
    )


WRITES: dict[str, Case] = {
    "64 tokens": write(64, 128),
    "64 tokens, normed, rotated": write(64, 128, pairs=64, normed=True),
    "one token, rotated": write(1, 128, pairs=64),
    "72 tokens, rotated, queries in two arrays": write(72, 128, pairs=64),
    "4096 tokens, rotated, int8": write(4096, 128, "int8", pairs=64),
    "4096 tokens, rotated": write(4096, 128, pairs=64),
    "64 tokens, normed, rotated in part, head dim 64, int8": write(64, 64, "int8", pairs=32, normed=True),
    "4096 tokens, normed, rotated in part, head dim 256": write(4096, 256, pairs=32, normed=True),
    "4096 tokens, rotated, fp8": write(4096, 128, E4M3, pairs=64),
    "4096 tokens, normed, rotated, head dim 256, fp8": write(4096, 256, E4M3, pairs=128, normed=True),
}


def copy(kind: str, page_size: int, **how: Any) -> Case:
    """A copy of sixteen pages with eight kv heads."""
    pages, ids = cache_of(kind, (1 << 10, 8, page_size, 128)), jax.ShapeDtypeStruct((16,), jnp.int32)
    return partial(copy_pages, **how), (pages, pages, ids, ids)


def decode_eight_bits(
    head_dim: int, page_size: int, kind: str, *, in_registers: bool = True, **ways: Any
) -> Case:
    function, (q, cache, _, *where) = decode(head_dim, page_size, in_registers=in_registers, **ways)
    pages = cache_of(kind, cache.shape)
    return function, (q, pages, pages, *where)


EIGHT_BITS: dict[str, Case] = {
    "head dim 64, int8": decode_eight_bits(64, 64, "int8"),
    "head dim 128, int8": decode_eight_bits(128, 64, "int8"),
    "head dim 256, int8": decode_eight_bits(256, 64, "int8"),
    "head dim 128, fp8": decode_eight_bits(128, 64, E4M3),
    "head dim 64, fp8, pages of 16, window, cap": decode_eight_bits(64, 16, E4M3, **ALL),
    "head dim 256, fp8, pages of 32, window, cap": decode_eight_bits(256, 32, E4M3, **ALL),
}
EIGHT_BITS_INTERPRETED: dict[str, Case] = {
    "head dim 128, int8": decode_eight_bits(128, 64, "int8", in_registers=False)
}
COPIES: dict[str, Case] = {
    "pages of 64": copy("", 64),
    "pages of 16, int8": copy("int8", 16),
    "pages of 128, fp8": copy(E4M3, 128),
}


def latent(
    heads: int, page_size: int = 64, *, rank: int = 512, key_dim: int = 576, dtype: Any = jnp.bfloat16
) -> Case:
    """Rows of up to 4096 tokens, in DeepSeek V3's form if nothing else is said."""
    q, pages = (
        jax.ShapeDtypeStruct((16, heads, key_dim), dtype),
        jax.ShapeDtypeStruct((1 << 10, 1, page_size, key_dim), dtype),
    )
    tables, lengths = (
        jax.ShapeDtypeStruct((16, 4096 // page_size), jnp.int32),
        jax.ShapeDtypeStruct((16,), jnp.int32),
    )
    return partial(latent_attention_decode, options=AttentionOptions(0.1), rank=rank), (
        q,
        pages,
        tables,
        lengths,
    )


LATENT_THREADS = 384  # per block
LATENT: dict[str, Case] = {
    "16 heads": latent(16),
    "64 heads, pages of 16": latent(64, 16),
    "128 heads": latent(128),
    "20 heads, pages of 32, float16": latent(20, 32, dtype=jnp.float16),
    "16 heads, rank 256, pages of 128": latent(16, 128, rank=256, key_dim=320),
}


def prefill(
    head_dim: int,
    page_size: int,
    *,
    group: int = 4,
    tile: int = 64,
    dtype: Any = jnp.bfloat16,
    kind: str = "",
    kernel: Callable[..., Any] = paged_attention_prefill,
    **ways: Any,
) -> Case:
    """Tiles of sequences of up to 4096 tokens, so many that blocks walk over several, and eight kv heads;
    kind: of an eight-bit cache.
    """
    tiles, kv_heads = 64, 8
    cache = cache_of(kind, (1 << 10, kv_heads, page_size, head_dim), dtype)
    q = jax.ShapeDtypeStruct((tiles, tile, kv_heads * group, head_dim), dtype)
    tables, numbers = (
        jax.ShapeDtypeStruct((tiles, 4096 // page_size), jnp.int32),
        jax.ShapeDtypeStruct((tiles,), jnp.int32),
    )
    function = partial(kernel, options=AttentionOptions(head_dim**-0.5, **ways))
    return function, (q, cache, cache, tables, numbers, numbers)


def grouped_rows(rows: int, kind: str = "", *, out: int = 1536, in_registers: bool = True) -> Case:
    """A grouped product: `rows` rows of 2048 inputs in 128 groups, the number of experts of Qwen3-30B-A3B."""
    x, chosen = jax.ShapeDtypeStruct((rows, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((rows,), jnp.int32)
    weight = jax.ShapeDtypeStruct((128, out, 2048), jnp.dtype(kind or "bfloat16"))
    scale = jax.ShapeDtypeStruct((128, out), jnp.float32) if kind else None

    def run(x: Any, chosen: Any, weight: Any, scale: Any) -> Any:
        groups = grouped(chosen, 128)
        return grouped_product(x[groups.row], weight, scale, groups, operand_in_registers=in_registers)

    return run, (x, chosen, weight, scale)


def eight_bits(
    rows: int,
    kind: str,
    out: int = 28672,
    *,
    dtype: Any = jnp.bfloat16,
    both: bool = False,
    blocks: bool = False,
    experts: int = 1,
) -> Case:
    """Rows of 4096 inputs by weights in eight bits.

    Args:
        both: whether rows have eight bits too.
        blocks: whether there is a scale for each group of inputs.
    """
    inputs, by_group = 4096, (4096 // 128,) * blocks
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.dtype(kind if both else jnp.bfloat16))
    weight = jax.ShapeDtypeStruct((experts, out, inputs), jnp.dtype(kind))
    scale = jax.ShapeDtypeStruct((experts, out, *by_group), jnp.float32)
    x_scale = jax.ShapeDtypeStruct((*by_group, rows), jnp.float32) if both else None

    def run(x: Any, weight: Any, scale: Any, x_scale: Any, chosen: Any) -> Any:
        groups, block = (grouped(chosen, experts), None) if experts > 1 else one_group(rows)
        if experts > 1:
            x, x_scale = x[groups.row], x_scale[..., groups.row]
        return grouped_product(x, weight, scale, groups, block=block, dtype=dtype, x_scale=x_scale)

    return run, (x, weight, scale, x_scale, jax.ShapeDtypeStruct((rows,), jnp.int32))


def row_of(size: int, kind: str, **how: Any) -> Case:
    """Sum, norm and quantization of 64 rows; or, with `gate`, activation and quantization."""
    row = jax.ShapeDtypeStruct((64, size), jnp.bfloat16)
    if "gate" in how:
        return partial(quantize_rows, kind=kind, **how), (jax.ShapeDtypeStruct((64, 2 * size), jnp.bfloat16),)
    weight = jax.ShapeDtypeStruct((size,), jnp.bfloat16)
    return lambda x, add, weight: quantize_rows(x, kind, add=add, norm=Norm(weight, 1e-5, 0.0), **how), (
        row,
        row,
        weight,
    )


ROWS: dict[str, Case] = {
    "4096 numbers, summed and normed, fp8": row_of(4096, E4M3),
    "16384 numbers, summed and normed, int8": row_of(16384, "int8"),
    "14336 numbers, gated, fp8": row_of(14336, E4M3, gate="silu"),
    "28672 numbers, gated, int8": row_of(28672, "int8", gate="silu"),
    "7168 numbers, summed and normed, fp8 by group": row_of(7168, E4M3, by_group=True),
    "18432 numbers, gated, fp8 by group": row_of(18432, E4M3, gate="silu", by_group=True),
}
GROUPED_THREADS = 384
in_blocks = partial(eight_bits, kind=E4M3, both=True, blocks=True)
GROUPED: dict[str, Case] = {
    "64 rows": grouped_rows(64),
    "64 rows, int8": grouped_rows(64, "int8"),
    "64 rows, fp8": grouped_rows(64, E4M3),
    "2048 rows": grouped_rows(2048),
    "2048 rows, int8": grouped_rows(2048, "int8"),
    "65536 rows": grouped_rows(65536),
    "65536 rows, fp8": grouped_rows(65536, E4M3),
    "64 rows, 192 outputs": grouped_rows(64, out=192),
    "8 rows, int8, one group, float32": eight_bits(8, "int8", dtype=jnp.float32),
    "256 rows, fp8, one group": eight_bits(256, E4M3),
    "512 rows, int8, one group, float32": eight_bits(512, "int8", dtype=jnp.float32),
    "8 rows, both fp8": eight_bits(8, E4M3, both=True),
    "8 rows, both fp8, few outputs": eight_bits(8, E4M3, 4096, both=True),
    "64 rows, both int8": eight_bits(64, "int8", both=True),
    "8 rows, blocks of fp8": eight_bits(8, E4M3, blocks=True),
    "64 rows, blocks of fp8, few outputs": eight_bits(64, E4M3, 4096, blocks=True),
    "8 rows, both fp8 in blocks, few outputs": in_blocks(8, out=4096),
    "32 rows, both fp8 in blocks": in_blocks(32),
    "64 rows, both fp8 in blocks, few outputs": in_blocks(64, out=4096),
    "2048 rows, both fp8 in blocks": in_blocks(2048),
    "64 rows of experts, both fp8 in blocks": in_blocks(64, out=1536, experts=128),
    "65536 rows of experts, both fp8 in blocks": in_blocks(1 << 16, out=1536, experts=128),
}


def four_bits(shape: tuple[int, ...], group: int, offset: bool, kind: str) -> Any:
    """A weight, packed."""
    numbers = jax.ShapeDtypeStruct(shape, jnp.int8)
    scale = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // group), jnp.float32)
    return jax.eval_shape(partial(pack, group=group, kind=kind), numbers, scale, scale if offset else None)


def int4(
    rows: int,
    out: int = 28672,
    size: int = 4096,
    *,
    group: int = 128,
    offset: bool = True,
    kind: str = "int4",
) -> Case:
    """Rows of a Llama of 8B parameters by gate and up, if nothing else is said."""
    x = jax.ShapeDtypeStruct((rows, size), jnp.bfloat16)
    return partial(int4_product, cores=132), (x, four_bits((out, size), group, offset, kind))


def int4_experts(rows: int, *, group: int = 32, offset: bool = False, kind: str = "e2m1") -> Case:
    """Rows of 128 experts as gpt-oss-120b has them: gate and up."""
    x, chosen = jax.ShapeDtypeStruct((rows, 2880), jnp.bfloat16), jax.ShapeDtypeStruct((rows,), jnp.int32)

    def run(x: Any, chosen: Any, weight: Any) -> Any:
        groups = grouped(chosen, 128)
        return grouped_int4_product(x[groups.row], weight, groups)

    return run, (x, chosen, four_bits((128, 5760, 2880), group, offset, kind))


FOUR_BITS: dict[str, Case] = {
    "8 rows": int4(8),
    "16 rows": int4(16),
    "32 rows": int4(32),
    "64 rows": int4(64),
    "8192 rows": int4(8192),
    "8 rows, inputs split": int4(8, 4096, 14336),
    "128 rows, inputs split, groups of 32": int4(128, 4096, 14336, group=32),
    "8 rows, groups of 64": int4(8, group=64),
    "8 rows, groups of 32": int4(8, group=32),
    "512 rows, groups of 64": int4(512, group=64),
    "8 rows, without offsets": int4(8, offset=False),
    "32 rows of experts, MXFP4": int4_experts(32),
    "2048 rows of experts, MXFP4": int4_experts(2048),
    "32768 rows of experts, MXFP4": int4_experts(32768),
    "32 rows of experts, groups of 64": int4_experts(32, group=64, offset=True, kind="int4"),
}
GROUPED_INTERPRETED: dict[str, Case] = {"64 rows, int8": grouped_rows(64, "int8", in_registers=False)}
PREFILL_THREADS = 384  # per block; 256 if a kv head has at most 64 rows
PREFILL_CASES: dict[str, Case] = {
    "head dim 64": prefill(64, 64),
    "head dim 128": prefill(128, 64),
    "head dim 256": prefill(256, 64),
    "head dim 128, group 7, float16": prefill(128, 64, group=7, dtype=jnp.float16),
    "head dim 64, pages of 16, window, cap": prefill(64, 16, **ALL),
    "head dim 128, pages of 16, window, cap": prefill(128, 16, **ALL),
    "head dim 256, pages of 16, window, cap": prefill(256, 16, **ALL),
    "head dim 128, pages of 128, tiles of 128": prefill(128, 128, tile=128),
    "head dim 64, fp8": prefill(64, 64, kind=E4M3),
    "head dim 128, int8": prefill(128, 64, kind="int8"),
    "head dim 128, fp8, pages of 16, window, cap": prefill(128, 16, kind=E4M3, **ALL),
    "head dim 128, sinks": with_sinks(*prefill(128, 64)),
    "head dim 64, group 8, window, sinks": with_sinks(*prefill(64, 64, group=8, window=128)),
}
PREFILL_WIDE: dict[str, Case] = {"head dim 256, int8": prefill(256, 64, kind="int8")}
PREFILL_ALONE: dict[str, Case] = {
    f"head dim {size}, one head a kv head": prefill(size, 64, group=1) for size in (64, 128)
}
PREFILL_INTERPRETED: dict[str, Case] = {
    f"head dim {size}": prefill(size, 64, kernel=partial(paged_attention_prefill, operand_in_registers=False))
    for size in (64, 128, 256)
}


# --- Ampere, Ada, and Blackwell, which runs their kernels ---
AMPERE, AMPERE_THREADS = ("a100", "rtx3090", "l4", "b200", "rtx5090"), 128


def facts_of(target: str, cases: list[Case]) -> list[KernelFacts]:
    """Facts about each case's kernel. The process must not have compiled for another compute capability
    before.
    """
    there = device(target)
    return [facts for function, args in cases for facts in kernel_facts(there, function, *args)[0]]


def facts_elsewhere(target: str, cases: list[Case]) -> list[KernelFacts]:
    """`facts_of` in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(facts_of, target, cases).result()


def row(name: str, facts: KernelFacts, threads: int = THREADS) -> str:
    figures = (facts.registers, facts.spilled, facts.shared, facts.blocks(threads), facts.products)
    return f"| {name} | " + " | ".join(map(str, figures)) + " |"


def table(title: str, cases: dict[str, Case], threads: int = THREADS) -> None:
    print(f"| {title} | registers | bytes spilled | shared memory | blocks a multiprocessor | products |")
    print("|---|---|---|---|---|---|")
    for name, facts in zip(cases, facts_of("h200", list(cases.values())), strict=True):
        print(row(name, facts, threads), flush=True)
    print()


def in_memory(cases: dict[str, Case]) -> dict[str, Case]:
    return {f"{name}, operands in shared memory": case for name, case in cases.items()}


def main() -> None:
    table("decode attention", CASES | in_memory(INTERPRETED))
    table("decode attention, eight-bit caches", EIGHT_BITS | in_memory(EIGHT_BITS_INTERPRETED))
    table("latent decode attention", LATENT, LATENT_THREADS)
    table("prefill attention", PREFILL_CASES | PREFILL_WIDE | in_memory(PREFILL_INTERPRETED), PREFILL_THREADS)
    table("prefill attention", PREFILL_ALONE)
    table("grouped products", GROUPED | in_memory(GROUPED_INTERPRETED), GROUPED_THREADS)
    table("four-bit products", FOUR_BITS, GROUPED_THREADS)
    table("quantized rows", ROWS, threads=128)
    table("cache writes", WRITES, threads=128)
    table("page copies", COPIES, threads=128)


if __name__ == "__main__":
    main()
