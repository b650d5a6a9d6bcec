"""Chooses the form of a product on this processor: by rule or, if the rule does not decide, by a few
milliseconds of measurement."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.llvm import amx, native
from pallas_kernels.llvm.formats import Processor, processor
from pallas_kernels.llvm.kinds import INPUTS
from pallas_kernels.llvm.max_isa import limit
from pallas_kernels.products.cpu import panels
from pallas_kernels.products.cpu.products import by_float32, by_row, tiles_serve
from pallas_kernels.products.cpu.tiles import OUTS
from pallas_kernels.products.weight import ROW_CLASSES, form_key
from pallas_kernels.products.weights import abstract, product, stored
from pallas_kernels.quantization.formats import WeightFormat
from pallas_kernels.quantization.hadamard import block_of

# numbers of rows above which panels are faster than the kernel for four bits: of floats, and of bytes
FOUR_BITS = ROW_CLASSES[-1], ROW_CLASSES[-2]
FLOAT32 = ROW_CLASSES[-2]  # number of rows above which they are converted where pairs are slow
MANY = 256  # number of rows representing a prompt
REPEATS = 5
# required share of the first form's time, so that noise does not change the choice and cause compilations
CLEARLY = 0.9


def candidates(at: Processor, x: str, weight: WeightFormat, rows: int) -> tuple[str, ...]:
    """Forms between which a measurement decides. The first one wins if they are similar.

    XLA is not a candidate for eight-bit weights, which it converts in a separate pass, nor for one row, where
    it takes ten times as long as the kernel. With AMX it may be faster from two rows on; otherwise only for
    prompts. For prompts, panels are always faster than the kernel, and for four bits than XLA; see FOUR_BITS.
    For fewer rows by `w4a8`, that depends on the size of groups.
    """
    able = panels.serves(at, x, weight)
    by_tiles = ("amx",) if at.tiles and rows > 1 and tiles_serve(x, weight, OUTS) else ()
    if weight.bits == 4:
        if rows == 1 and by_row(at, x, weight):
            return ("row",)
        if able and rows > FOUR_BITS[weight.inputs is not None]:
            return ("panels", *by_tiles)
        return ("kernel", *(("panels",) if able and weight.inputs and rows > 1 else ()), *by_tiles)
    as_it_is = weight.numbers in INPUTS or weight.inputs == "int8"  # without conversions of numbers
    kernel = "float32" if rows > FLOAT32 and by_float32(at, x, weight) else "kernel"
    if rows == 1 or not as_it_is:
        return (kernel,)
    if rows <= ROW_CLASSES[-1]:
        return (kernel, *by_tiles, "xla") if by_tiles else (kernel,)
    return ("panels" if able else kernel, *by_tiles, "xla")


def forms(
    x: str,
    weights: Sequence[WeightFormat],
    shape: tuple[int, int],
    known: Mapping[str, str],
    *,
    by_place: bool = True,
) -> dict[str, str]:
    """Forms for every number of rows, by `form_key`.

    Args:
        x: dtype of activations; weights: formats for which a CPU has kernels.
        shape: [out, in] of the measured weight.
        known: results of an earlier measurement.
        by_place: whether a row's sum may depend on its place, as in XLA's form, or on the number of rows, as
            where it decides between forms; otherwise all are the kernel's.
    """
    if x not in INPUTS:
        return {}
    at, times = processor(native.host()), {}
    at = at if amx.permitted() else replace(at, tiles=False)
    for weight in weights:
        for rows in (1, *(last // 2 for last in ROW_CLASSES[1:]), MANY):
            key = form_key(rows, x, weight.name)
            able = candidates(at, x, weight, rows) if by_place else ("kernel",)
            if limit() is not None:  # the libraries that XLA calls do not follow the flag
                able = tuple(form for form in able if form != "xla")
            if len(able) == 1 or known.get(key) not in able:
                times[key] = able[0] if len(able) == 1 else _fastest(able, rows, x, weight, shape)
            else:
                times[key] = known[key]
    return times


def _fastest(able: Sequence[str], rows: int, x: str, weight: WeightFormat, shape: tuple[int, int]) -> str:
    """The fastest form, by the minimum of alternating measurements."""
    inputs = jnp.ones((rows, shape[1]), x)
    plain = jax.ShapeDtypeStruct(shape, x if weight.bits <= 8 else weight.numbers)
    sample = abstract(plain, weight, hadamard=block_of(shape[1]) if weight.inputs else 1)
    sample = jax.tree.map(lambda array: jnp.ones(array.shape, array.dtype), sample)
    programs = {}
    for form in able:
        args = inputs, stored(sample).with_forms(((form_key(rows, x, weight.name), form),))
        programs[form] = partial(jax.jit(product).lower(*args).compile(), *args)
    least = dict.fromkeys(able, float("inf"))
    for _ in range(REPEATS):
        for form, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            least[form] = min(least[form], time.perf_counter() - start)
    return min(able, key=lambda form: least[form] * (CLEARLY if form == able[0] else 1))
