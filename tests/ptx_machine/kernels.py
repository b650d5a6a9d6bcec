"""Small kernels written by hand."""

from __future__ import annotations

import re

import numpy as np

from tools.ptx_machine.launch import Launch, addresses
from tools.ptx_machine.machine import Result, execute
from tools.ptx_machine.memory import Array
from tools.ptx_machine.schedules import Schedule
from tools.ptx_machine.syntax import parse
from tools.ptx_machine.translate import translate

HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.file 1 "kernel.py"
.visible .entry small({params})
.maxntid {threads}, 1, 1
{{
.reg .pred %p<16>;
.reg .b16 %h<16>;
.reg .b32 %r<64>;
.reg .b64 %d<32>;
.shared .align 1024 .b8 memory[{shared}];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %laneid;
mov.u32 %r2, %ctaid.x;
{loads}
{body}
ret;
}}
"""


def source(body: str, arrays: int, threads: int, shared: int) -> str:
    """PTX. %r0: thread, %r1: lane, %r2: block, %d0 and on: addresses of the arrays.

    Line i of the body comes from kernel.py:i, as its .loc says.
    """
    lines = [x.strip() for x in body.strip().splitlines()]
    marked = "\n".join(f".loc 1 {i} 0\n{line}" for i, line in enumerate(lines, 1))
    return HEAD.format(
        params=", ".join(f".param .u64 p{i}" for i in range(arrays)),
        threads=threads,
        shared=shared,
        loads="\n".join(f"ld.param.u64 %d{i}, [p{i}];" for i in range(arrays)),
        body=marked,
    )


def run(
    body: str,
    *arrays: Array,
    threads: int = 32,
    grid: int = 1,
    shared: int = 4096,
    maps: tuple = (),
    schedule: Schedule | None = None,
    limit: int = 1_000_000,
) -> Result:
    """Executes a kernel. Tensor maps come after the arrays, as the parameter `maps`."""
    text = source(body, len(arrays), threads, shared)
    if maps:
        text = text.replace(")\n.maxntid", f", .param .align 64 .b8 maps[{128 * len(maps)}])\n.maxntid")
    given = tuple(addresses(len(arrays))) + ((maps,) if maps else ())
    launch = Launch((grid, 1, 1), (0, 0, 0), (threads, 1, 1), 0, given)
    return execute(translate(parse(text)), launch, list(arrays), schedule, limit=limit)


def without(body: str, pattern: str, count: int = 1) -> str:
    """A kernel with a planted fault: instructions are removed."""
    changed, found = re.subn(
        rf"^[^\n]*{pattern}[^\n]*$", "griddepcontrol.wait;", body, count=count, flags=re.M
    )
    assert found == count, f"{pattern}: {found} of {count}"
    return changed


def swapped(body: str, old: str, new: str) -> str:
    """A kernel with a planted fault: text is replaced."""
    assert body.count(old) == 1, f"{old}: {body.count(old)} times"
    return body.replace(old, new)


def lines_of(result: Result) -> set[tuple[str, int, int]]:
    """Kind, line of the program and line of the other access (as .loc says; 0: none) of all errors."""

    def number(source: str) -> int:
        return int(source.split(":")[-1]) if source else 0

    return {(x.kind, number(x.source), number(x.other_source)) for x in result.errors}


def output(count: int, dtype: type = np.uint32) -> Array:
    return Array("out", np.zeros(count, dtype), False)
