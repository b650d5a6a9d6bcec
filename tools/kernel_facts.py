"""Print what the compiler says of every kernel, compiled for a GPU that is not there.

JAX_PLATFORMS=cpu python tools/kernel_facts.py  # with the extra `aot`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ahead_of_time import KernelFacts, device, kernel_facts
from pallas_kernels.attention_decode import paged_attention_decode
from pallas_kernels.attention_prefill import paged_attention_prefill
from pallas_kernels.copy_pages import copy_pages
from pallas_kernels.kv_write import kv_write
from pallas_kernels.quantized import Pages, movable, quantize

Case = tuple[Callable[..., Any], tuple[Any, ...]]
ALL = {"window": 1024, "soft_cap": 30.0}
THREADS = 256  # of a block


def decode(
    head_dim: int, page_size: int, splits: int, *, group: int = 4, dtype: Any = jnp.bfloat16, in_registers: bool = True, **ways: Any
) -> Case:
    """Sixteen rows of up to 4096 tokens and eight kv heads."""
    rows, kv_heads, pages = 16, 8, 1 << 10
    cache = jax.ShapeDtypeStruct((pages, kv_heads, page_size, head_dim), dtype)
    q = jax.ShapeDtypeStruct((rows, kv_heads * group, head_dim), dtype)
    tables, lengths = jax.ShapeDtypeStruct((rows, 4096 // page_size), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    function = partial(paged_attention_decode, scale=head_dim**-0.5, splits=splits, operand_in_registers=in_registers, **ways)
    return function, (q, cache, cache, tables, lengths)


CASES: dict[str, Case] = {
    "head dim 64": decode(64, 64, 4),
    "head dim 128": decode(128, 64, 4),
    "head dim 256": decode(256, 64, 4),
    "head dim 128, one split": decode(128, 64, 1),
    "head dim 128, group 8, float16": decode(128, 64, 4, group=8, dtype=jnp.float16),
    "head dim 64, pages of 16, window, cap": decode(64, 16, 4, **ALL),
    "head dim 128, pages of 16, window, cap": decode(128, 16, 4, **ALL),
    "head dim 256, pages of 16, window, cap": decode(256, 16, 4, **ALL),
    "head dim 128, pages of 128, one head": decode(128, 128, 4, group=1),
}
INTERPRETED: dict[str, Case] = {f"head dim {size}": decode(size, 64, 4, in_registers=False) for size in (64, 128, 256)}


def cache_of(kind: str, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Pages:
    """Pages of a 16-bit dtype, or quantized to an eight-bit one."""
    plain = jax.ShapeDtypeStruct(shape, dtype)
    return jax.eval_shape(lambda x: movable(quantize(x, kind)), plain) if kind else plain  # type: ignore[return-value]


def write(tokens: int, head_dim: int, kind: str = "", *, pairs: int = 0) -> Case:
    """Tokens of eight kv heads."""
    pages = cache_of(kind, (1 << 10, 8, 64, head_dim))
    new, where = jax.ShapeDtypeStruct((tokens, 8, head_dim), jnp.bfloat16), jax.ShapeDtypeStruct((tokens,), jnp.int32)
    angles = jax.ShapeDtypeStruct((tokens, pairs), jnp.float32)
    rotation = (angles, angles) if pairs else None
    return lambda *args: kv_write(*args[:-1], rotation=args[-1]), (pages, pages, new, new, where, where, rotation)


WRITES: dict[str, Case] = {
    "64 tokens": write(64, 128),
    "64 tokens, rotated": write(64, 128, pairs=64),
    "4096 tokens, rotated": write(4096, 128, pairs=64),
    "64 tokens, rotated in part, head dim 64, int8": write(64, 64, "int8", pairs=32),
    "64 tokens, rotated, int8": write(64, 128, "int8", pairs=64),
    "4096 tokens, rotated, fp8": write(4096, 128, "float8_e4m3fn", pairs=64),
    "4096 tokens, rotated, head dim 256, fp8": write(4096, 256, "float8_e4m3fn", pairs=128),
}


def copy(kind: str, page_size: int) -> Case:
    """Sixteen pages of eight kv heads."""
    pages, ids = cache_of(kind, (1 << 10, 8, page_size, 128)), jax.ShapeDtypeStruct((16,), jnp.int32)
    return copy_pages, (pages, pages, ids, ids)


COPIES: dict[str, Case] = {
    "pages of 64": copy("", 64),
    "pages of 16, int8": copy("int8", 16),
    "pages of 128, fp8": copy("float8_e4m3fn", 128),
}


def prefill(
    head_dim: int, page_size: int, *, group: int = 4, tile: int = 64, dtype: Any = jnp.bfloat16, in_registers: bool = True, **ways: Any
) -> Case:
    """Eight tiles of sequences of up to 4096 tokens, and eight kv heads."""
    tiles, kv_heads, pages = 8, 8, 1 << 10
    cache = jax.ShapeDtypeStruct((pages, kv_heads, page_size, head_dim), dtype)
    q = jax.ShapeDtypeStruct((tiles, tile, kv_heads * group, head_dim), dtype)
    tables, numbers = jax.ShapeDtypeStruct((tiles, 4096 // page_size), jnp.int32), jax.ShapeDtypeStruct((tiles,), jnp.int32)
    function = partial(paged_attention_prefill, scale=head_dim**-0.5, operand_in_registers=in_registers, **ways)
    return function, (q, cache, cache, tables, numbers, numbers)


PREFILL_THREADS = 384  # of a block; 256 where a kv head has no more than 64 rows
PREFILL_CASES: dict[str, Case] = {
    "head dim 64": prefill(64, 64),
    "head dim 128": prefill(128, 64),
    "head dim 256": prefill(256, 64),
    "head dim 128, group 7, float16": prefill(128, 64, group=7, dtype=jnp.float16),
    "head dim 64, pages of 16, window, cap": prefill(64, 16, **ALL),
    "head dim 128, pages of 16, window, cap": prefill(128, 16, **ALL),
    "head dim 256, pages of 16, window, cap": prefill(256, 16, **ALL),
    "head dim 128, pages of 128, tiles of 128": prefill(128, 128, tile=128),
}
PREFILL_ALONE: dict[str, Case] = {f"head dim {size}, one head a kv head": prefill(size, 64, group=1) for size in (64, 128)}
PREFILL_INTERPRETED: dict[str, Case] = {f"head dim {size}": prefill(size, 64, in_registers=False) for size in (64, 128, 256)}


def row(name: str, facts: KernelFacts, threads: int) -> str:
    figures = (facts.registers, facts.spilled, facts.shared, facts.blocks(threads), facts.products)
    return f"| {name} | " + " | ".join(map(str, figures)) + " |"


def table(title: str, cases: dict[str, Case], threads: int = THREADS) -> None:
    print(f"| {title} on an H200 | registers | bytes spilled | shared memory | blocks a multiprocessor | products |")
    print("|---|---|---|---|---|---|")
    for name, (function, args) in cases.items():
        [facts], _ = kernel_facts(device("h200"), function, *args)
        print(row(name, facts, threads), flush=True)
    print()


def in_memory(cases: dict[str, Case]) -> dict[str, Case]:
    return {f"{name}, operands in shared memory": case for name, case in cases.items()}


def main() -> None:
    table("decode attention", CASES | in_memory(INTERPRETED))
    table("prefill attention", PREFILL_CASES | in_memory(PREFILL_INTERPRETED), PREFILL_THREADS)
    table("prefill attention", PREFILL_ALONE)
    table("cache writes", WRITES, threads=128)
    table("page copies", COPIES, threads=128)


if __name__ == "__main__":
    main()
