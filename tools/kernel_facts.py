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
from pallas_kernels.quantized import Quantized

Case = tuple[Callable[..., Any], tuple[Any, ...]]  # of jax.ShapeDtypeStruct
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


def prefill(
    head_dim: int,
    page_size: int,
    *,
    group: int = 4,
    tile: int = 64,
    dtype: Any = jnp.bfloat16,
    kind: str | None = None,
    in_registers: bool = True,
    **ways: Any,
) -> Case:
    """Eight tiles of sequences of up to 4096 tokens, and eight kv heads; kind: of an eight-bit cache."""
    tiles, kv_heads, shape = 8, 8, (1 << 10, 8, page_size, head_dim)
    cache: Any = jax.ShapeDtypeStruct(shape, dtype)
    if kind is not None:
        values = jax.ShapeDtypeStruct(shape, jnp.int8 if kind == "int8" else jnp.uint8)
        cache = Quantized(values, jax.ShapeDtypeStruct(shape[:3], jnp.float32), kind=kind)  # type: ignore[arg-type]
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
    "head dim 64, fp8": prefill(64, 64, kind="float8_e4m3fn"),
    "head dim 128, int8": prefill(128, 64, kind="int8"),
    "head dim 128, fp8, pages of 16, window, cap": prefill(128, 16, kind="float8_e4m3fn", **ALL),
}
PREFILL_WIDE: dict[str, Case] = {"head dim 256, int8": prefill(256, 64, kind="int8")}
PREFILL_ALONE: dict[str, Case] = {f"head dim {size}, one head a kv head": prefill(size, 64, group=1) for size in (64, 128)}
PREFILL_INTERPRETED: dict[str, Case] = {f"head dim {size}": prefill(size, 64, in_registers=False) for size in (64, 128, 256)}


def row(name: str, facts: KernelFacts, threads: int) -> str:
    figures = (facts.registers, facts.spilled, facts.shared, facts.blocks(threads), facts.products)
    return f"| {name} | " + " | ".join(map(str, figures)) + " |"


def main() -> None:
    print("| attention on an H200 | registers | bytes spilled | shared memory | blocks a multiprocessor | products |")
    print("|---|---|---|---|---|---|")
    h200 = device("h200")
    in_memory = ", operands in shared memory"
    for cases, threads, kernel, form in (
        (CASES, THREADS, "decode", ""),
        (INTERPRETED, THREADS, "decode", in_memory),
        (PREFILL_CASES, PREFILL_THREADS, "prefill", ""),
        (PREFILL_WIDE, PREFILL_THREADS, "prefill", ""),
        (PREFILL_ALONE, THREADS, "prefill", ""),
        (PREFILL_INTERPRETED, PREFILL_THREADS, "prefill", in_memory),
    ):
        for name, (function, args) in cases.items():
            [facts], _ = kernel_facts(h200, function, *args)
            print(row(f"{kernel}, {name}{form}", facts, threads), flush=True)


if __name__ == "__main__":
    main()
