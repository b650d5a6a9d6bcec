"""Executes one instruction for 32 lanes, through the parser and the translation; data for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import numpy as np
from hypothesis import strategies as st

from tools.ptx_machine.syntax import parse
from tools.ptx_machine.translate import DTYPES, SPECIAL, Program, translate

PREFIX = {"p": "%p", "b8": "%rb", "b16": "%rs", "b32": "%r", "b64": "%rd"}
TYPES = {"p": "pred", "b8": "b8", "b16": "b16", "b32": "b32", "b64": "b64"}


def kernel(body: str, declared: str = "", params: str = "") -> str:
    registers = "\n".join(f".reg .{TYPES[kind]} {PREFIX[kind]}<40>;" for kind in PREFIX)
    head = f".version 9.0\n.target sm_90a\n.visible .entry test({params})\n.maxntid 128, 1, 1"
    return f"{head}\n{{\n{registers}\n{declared}\n{body}\nret;\n}}\n"


@cache
def program(instruction: str) -> Program:
    return translate(parse(kernel(instruction + ";")))


def execute(
    instruction: str, given: dict[str, list[int]], *results: str, mask: list[bool] | None = None
) -> list[list[int]]:
    """Values of registers after an instruction, as unsigned integers or bools; registers that are not given
    are 0.
    """
    made = program(instruction)
    registers = [np.zeros(32, DTYPES[kind]) for kind in made.kinds]
    for name, values in given.items():
        kind = DTYPES[made.kinds[made.index[name]]]
        registers[made.index[name]] = (
            np.array(values).astype(kind) if kind == np.bool_ else np.array(values, kind)
        )
    special = [np.arange(32, dtype=np.uint32) for _ in SPECIAL]
    step = made.steps[0]
    assert step.kind == "alu"
    with np.errstate(all="ignore"):
        if mask is None:
            step.fast(registers, special)
        else:
            step.masked(registers, special, np.array(mask))
    for register, kind in zip(registers, made.kinds, strict=True):
        assert register.dtype == DTYPES[kind] and register.shape == (32,) and register.flags.c_contiguous
    return [registers[made.index[name]].tolist() for name in results]


type Drawn = Callable[[random.Random], int]


def lanes(one: Drawn) -> st.SearchStrategy[list[int]]:
    """32 numbers. From a seed, since drawing each of them takes long."""

    def many(seed: int) -> list[int]:
        source = random.Random(seed)
        return [one(source) for _ in range(32)]

    return st.integers(0, 1 << 32).map(many)


def integers(width: int) -> Drawn:
    top = 1 << width
    near = (0, 1, 2, 7, 31, 32, 33, 63, 64, 255, top // 2 - 1, top // 2, top // 2 + 1, -2, -1)
    edges = sorted({x % top for x in near})
    return lambda source: source.choice(edges) if source.random() < 0.4 else source.randrange(top)


def floats(exponent: int, mantissa: int) -> Drawn:
    """Bits of floats: special ones, and many of similar size whose results are halfway between two."""
    bias, top = (1 << exponent - 1) - 1, 1 << mantissa
    fractions = [0, 1, 2, top - 1, top - 2, top // 2, top // 2 + 1, top // 3]
    exponents = [0, 1, 2, bias, 2 * bias, 2 * bias + 1]

    def one(source: random.Random) -> int:
        e = source.randint(bias - mantissa - 2, bias + mantissa + 2)
        if not 0 <= e <= 2 * bias or source.random() < 0.4:
            e = source.choice(exponents) if source.random() < 0.7 else source.randint(0, 2 * bias + 1)
        m = source.choice(fractions) if source.random() < 0.5 else source.randrange(top)
        return source.getrandbits(1) << exponent + mantissa | e << mantissa | m

    return one
