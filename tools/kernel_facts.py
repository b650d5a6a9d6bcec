"""Print what the compiler says of every kernel, compiled for a GPU that is not there.

JAX_PLATFORMS=cpu python tools/kernel_facts.py  # with the extra `aot`
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import ampere
from pallas_kernels.ahead_of_time import KernelFacts, device, kernel_facts
from pallas_kernels.attention_decode import paged_attention_decode

Case = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]
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


# For Ampere and Ada.
AMPERE, AMPERE_THREADS = ("a100", "l4"), 128


def ampere_decode(head_dim: int, page_size: int, splits: int, *, group: int = 4, dtype: Any = jnp.bfloat16, **ways: Any) -> Case:
    """As `decode`."""
    _, arrays = decode(head_dim, page_size, splits, group=group, dtype=dtype)
    return partial(ampere.paged_attention_decode, scale=head_dim**-0.5, splits=splits, **ways), arrays


def ampere_prefill(head_dim: int, page_size: int, splits: int, **ways: Any) -> Case:
    """Sixteen tiles of 64 queries, otherwise as `decode`."""
    _, (q, k, v, tables, lengths) = decode(head_dim, page_size, splits)
    tiles = jax.ShapeDtypeStruct((q.shape[0], 64, *q.shape[1:]), q.dtype)
    return partial(ampere.paged_attention_prefill, scale=head_dim**-0.5, splits=splits, **ways), (tiles, k, v, tables, lengths, lengths)


AMPERE_CASES: dict[str, Case] = {
    "decode, head dim 64": ampere_decode(64, 64, 4),
    "decode, head dim 128": ampere_decode(128, 64, 4),
    "decode, head dim 256": ampere_decode(256, 64, 4),
    "decode, head dim 128, one split": ampere_decode(128, 64, 1),
    "decode, head dim 128, group 16, float16": ampere_decode(128, 64, 4, group=16, dtype=jnp.float16),
    "decode, head dim 64, pages of 16, window, cap": ampere_decode(64, 16, 4, **ALL),
    "decode, head dim 128, pages of 16, window, cap": ampere_decode(128, 16, 4, **ALL),
    "decode, head dim 256, pages of 16, window, cap": ampere_decode(256, 16, 4, **ALL),
    "prefill, head dim 64": ampere_prefill(64, 64, 1),
    "prefill, head dim 128": ampere_prefill(128, 64, 1),
    "prefill, head dim 256": ampere_prefill(256, 64, 1),
    "prefill, head dim 64, pages of 16, window, cap": ampere_prefill(64, 16, 4, **ALL),
    "prefill, head dim 128, pages of 16, window, cap": ampere_prefill(128, 16, 4, **ALL),
    "prefill, head dim 256, pages of 16, window, cap": ampere_prefill(256, 16, 4, **ALL),
}


def facts_of(target: str, cases: list[Case]) -> list[KernelFacts]:
    """Facts of each case's kernel; in a process that has compiled for no other compute capability."""
    there = device(target)
    return [facts for function, args in cases for facts in kernel_facts(there, function, *args)[0]]


def facts_elsewhere(target: str, cases: list[Case]) -> list[KernelFacts]:
    """The same, from a process of their own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(facts_of, target, cases).result()


def row(name: str, facts: KernelFacts, threads: int = THREADS) -> str:
    figures = (facts.registers, facts.spilled, facts.shared, facts.blocks(threads), facts.products)
    return f"| {name} | " + " | ".join(map(str, figures)) + " |"


def main() -> None:
    print("| decode attention on an H200 | registers | bytes spilled | shared memory | blocks a multiprocessor | products |")
    print("|---|---|---|---|---|---|")
    h200 = device("h200")
    for cases, form in ((CASES, ""), (INTERPRETED, ", operands in shared memory")):
        for name, (function, args) in cases.items():
            [facts], _ = kernel_facts(h200, function, *args)
            print(row(name + form, facts), flush=True)
    for target in AMPERE:
        print(f"\n| attention on {target} | registers | bytes spilled | shared memory | blocks a multiprocessor | products |")
        print("|---|---|---|---|---|---|")
        for name, facts in zip(AMPERE_CASES, facts_elsewhere(target, list(AMPERE_CASES.values())), strict=True):
            print(row(name, facts, AMPERE_THREADS), flush=True)


if __name__ == "__main__":
    main()
