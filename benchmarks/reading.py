"""The least time to read arrays: all of a CPU's threads load every byte, prefetch, and compute nothing.

numpy's products read at only four fifths of this speed, so a bandwidth measured with them is no bound:
kernels that prefetch exceed it. Reading the arrays of a step themselves also accounts for the part of them
that stays in caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import native
from pallas_kernels.cpu.calls import call, register
from pallas_kernels.cpu.emit import I32, I64, PTR, Code, constant, vector

LINE, LINES = 64, 4  # bytes of a cache line; lines read at once
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
    frame, part, parts = code.function("read", [I64] * 3, internal=False)
    b, frame = code.b, code.b.inttoptr(frame, PTR)
    lines, shape = code.argument(frame, 0)
    arrays = code.word(frame, 9, PTR)
    with code.loop(0, code.word(shape, 0), 1, [constant(words, 0)]) as each:
        data = code.word(code.load(code.at(arrays, code.mul(code.add(each.index, 2), 8)), PTR, 8), 3, PTR)
        count = b.sdiv(b.zext(code.load(code.at(lines, code.mul(each.index, 4)), I32, 4), I64), I64(LINES))
        first, end = (code.mul(b.sdiv(code.mul(count, n), parts), LINES) for n in (part, code.add(part, 1)))
        with code.loop(first, end, LINES, [each.values[0], *[constant(words, 0)] * (LINES - 1)]) as loop:
            found = []
            for n, sums in enumerate(loop.values):
                place = code.at(data, code.mul(code.add(loop.index, n), LINE))
                code.fetch(code.at(place, AHEAD))
                found.append(b.xor(sums, code.load(place, words, 8)))
            loop.next(found)
        total: Any = loop.results[0]
        for other in loop.results[1:]:
            total = b.xor(total, other)
        each.next([total])
    half = code.shuffle(each.results[0], each.results[0], range(LINE // 16))
    code.store(half, code.at(code.result(frame, 0)[0], code.mul(b.srem(part, I64(LONGEST)), LINE // 2)), 8)
    b.ret_void()
    return str(code.module)
