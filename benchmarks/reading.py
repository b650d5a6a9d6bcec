"""The least time to read arrays: all of a CPU's threads load every byte, prefetch, and compute nothing.

numpy's products read at only four fifths of this speed, so a bandwidth measured with them is no bound:
kernels that prefetch exceed it. Reading the arrays of a step themselves also accounts for the part of them
that stays in caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.llvm import native
from pallas_kernels.llvm.calls import call, register
from pallas_kernels.llvm.code import LINE, Code, share
from pallas_kernels.llvm.types import I32, I64, PTR, vector

LINES = 4  # cache lines read at once
AHEAD = 8192  # prefetch distance in bytes
LONGEST = 1024  # maximum number of parts
# per run, so that calling the program takes a small share, and as many as steps in `Step.seconds_ahead`
PASSES = 10


def reader(arrays: Sequence[jax.Array]) -> Callable[[], float]:
    """A function that reads the arrays a few times and returns the seconds of one pass."""
    name = register("jengine_benchmark_read", lambda: native.compiled(source, "read"))
    lines = jnp.array([array.nbytes // (LINE * LINES) * LINES for array in arrays], jnp.int32)

    def passes(lines: jax.Array, *arrays: jax.Array) -> jax.Array:
        out = jnp.zeros((LONGEST, LINE // 8), jnp.float32)
        for _ in range(PASSES):
            out = call(name, jax.ShapeDtypeStruct(out.shape, out.dtype), lines, out, *arrays)
        return out

    program = jax.jit(passes).lower(lines, *arrays).compile()

    def seconds() -> float:
        start = time.perf_counter()
        program(lines, *arrays).block_until_ready()
        return (time.perf_counter() - start) / PASSES

    return seconds


def source() -> str:
    """The function `read` of int32 [arrays], the lines of each array, then the previous pass, then the
    arrays. Each part reads its share of each array, and stores half a line, so that nothing is optimized
    away.
    """
    code, words = Code(), vector(I64, LINE // 8)
    frame, part, parts = code.kernel("read")
    lines, shape = code.argument(frame, 0)
    arrays = code.word(frame, 9, PTR)
    sums = [code.variable(code.constant(words, 0)) for _ in range(LINES)]
    with code.loop(0, code.word(shape, 0)) as each:
        data = code.word(code.load(PTR, arrays + (each + 2) * 8, 8), 3, PTR)
        count = code.load(I32, lines + each * 4, 4).unsigned_to(I64) // LINES
        first, end = (n * LINES for n in share(count, part, parts))
        with code.loop(first, end, LINES) as line:
            for n, total in enumerate(sums):
                place = data + (line + n) * LINE
                code.prefetch(place + AHEAD)
                total.set(total.get() ^ code.load(words, place, 8))
    found = sums[0].get()
    for other in sums[1:]:
        found = found ^ other.get()
    half = found.pick(range(LINE // 16))
    code.store(half, code.result(frame, 0)[0] + part % LONGEST * (LINE // 2), 8)
    return code.text()
