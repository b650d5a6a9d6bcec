"""Measure how decode attention is best cut up on this machine's GPU, and write it to the table that `tuning` reads.

python -m pallas_kernels.tune [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, tuning
from pallas_kernels.attention_decode import paged_attention_decode
from pallas_kernels.devices import visible_devices
from pallas_kernels.quantized import Pages, movable, quantize
from pallas_kernels.tuning import DecodeCase, DecodeChoice

KINDS = {"bfloat16": None, "int8": "int8", "uint8": "float8_e4m3fn"}
CASES = [
    DecodeCase(cache, "bfloat16", heads, 8, head_dim, 64, rows, tokens)
    for cache, (heads, head_dim), rows, tokens in itertools.product(KINDS, [(32, 128), (64, 128)], (1, 16, 64), (1 << 12, 1 << 15))
]
WORTH = 0.98  # of the default's time, at most, for a choice to be written down
CALLS, ROUNDS = 20, 3

Timer = Callable[[DecodeCase, DecodeChoice], float]


@dataclass(frozen=True)
class Measured:
    """Seconds of the default choice and of the best one."""

    case: DecodeCase
    default: float
    choice: DecodeChoice
    best: float


def candidates(case: DecodeCase, cores: int) -> list[DecodeChoice]:
    """The default first, then others."""
    default = tuning.default_decode(case, cores)
    splits = sorted({max(1, default.splits * times // 4) for times in (1, 2, 3, 4, 6, 8)} | {1})
    others = (DecodeChoice(n, stages) for n in splits for stages in (None, 2, 3, 4, 6))
    return [default, *(choice for choice in others if choice != default)]


def search(cases: Iterable[DecodeCase], cores: int, timer: Timer) -> Iterator[Measured]:
    for case in cases:
        default, *others = candidates(case, cores)
        before = timer(case, default)
        times = {choice: timer(case, choice) for choice in others}
        best = min(times, key=times.__getitem__)
        yield Measured(case, before, *((best, times[best]) if times[best] <= WORTH * before else (default, before)))


def seconds(case: DecodeCase, choice: DecodeChoice) -> float:
    """Of one call on the default device, the fastest of some rounds; infinity where the choice does not fit."""
    run = jax.jit(partial(paged_attention_decode, scale=case.head_dim**-0.5, splits=choice.splits, stages=choice.stages))
    args = arrays(case)
    try:
        jax.block_until_ready(run(*args))
    except Exception as error:  # shared memory that there is not, as a ValueError or as the driver's own error
        print(f"left out: {choice}: {str(error).splitlines()[0]}")
        return math.inf

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            out = run(*args)
        out.block_until_ready()
        return (time.perf_counter() - start) / CALLS

    return min(timed() for _ in range(ROUNDS))


def arrays(case: DecodeCase) -> tuple[Any, ...]:
    """Queries, a cache in which every row has pages of its own, tables and lengths."""
    width = case.tokens // case.page_size
    shape = (case.rows * width + 1, case.kv_heads, case.page_size, case.head_dim)

    def pages(seed: int) -> Pages:
        plain = jax.random.normal(jax.random.key(seed), shape, case.dtype)
        kind = KINDS[case.cache]
        return movable(quantize(plain, kind)) if kind else plain

    q = jax.random.normal(jax.random.key(0), (case.rows, case.heads, case.head_dim), case.dtype)
    tables = jax.random.permutation(jax.random.key(1), jnp.arange(1, shape[0], dtype=jnp.int32)).reshape(case.rows, width)
    return q, jax.jit(pages, static_argnums=0)(2), jax.jit(pages, static_argnums=0)(3), tables, jnp.full(case.rows, case.tokens, jnp.int32)


def row(measured: Measured) -> str:
    gain = measured.default / measured.best
    chosen = f"{measured.choice.splits} | {measured.choice.stages or ''}"
    return f"| {measured.case.key()} | {measured.default * 1e6:.1f} | {measured.best * 1e6:.1f} | {gain:.2f} | {chosen} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__)
    parser.add_argument("--out", type=Path, default=tuning.FILE, help="file to write, and to keep other devices' entries of")
    out: Path = parser.parse_args(arguments).out
    [device, *_] = visible_devices()
    if getattr(device, "compute_capability", None) not in dispatch.HOPPER:
        parser.exit(1, f"device={device.device_kind}: tuning needs a Hopper GPU (compute capability {dispatch.HOPPER[0]})\n")
    print("| case | default, us | best, us | gain | splits | stages |\n|---|---|---|---|---|---|")
    found: dict[DecodeCase, DecodeChoice] = {}
    for measured in search(CASES, tuning.cores(device), seconds):
        print(row(measured), flush=True)
        if measured.best < measured.default:
            found[measured.case] = measured.choice
    table = json.loads(out.read_text()) if out.is_file() else {}
    out.write_text(json.dumps(tuning.updated(table, device.device_kind, found), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
