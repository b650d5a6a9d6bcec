"""Intel's AMX: eight registers of 16 rows of 64 bytes, and instructions that multiply them.

Linux allows a process to use them on request (`permitted`). A function configures them and releases them.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from pallas_kernels.llvm import native
from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.formats import processor
from pallas_kernels.llvm.types import I8, VOID
from pallas_kernels.llvm.values import Value

SIDE, LINE = 16, 64  # rows of a tile, and bytes of a row
TILE = SIDE * LINE  # bytes
REQUEST, TILE_DATA = 0x1023, 18  # of arch_prctl: permission to use part of the registers
# palette; bytes of a row and rows of each tile
CONFIG = bytes([1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8])


@cache
def permitted() -> bool:
    """Requests permission to use the tiles. Returns whether this process has it."""
    if (
        not sys.platform.startswith("linux")
        or platform.machine() != "x86_64"
        or not processor(native.host()).tiles
    ):
        return False
    return int(ctypes.CDLL(None).syscall(158, REQUEST, TILE_DATA)) == 0


@contextmanager
def configured(code: Code) -> Iterator[None]:
    """Code that may use the tiles."""
    code.call("llvm.x86.ldtilecfg", VOID, code.data("config", CONFIG))
    yield
    code.call("llvm.x86.tilerelease", VOID)


def instruction(code: Code, name: str, *operands: Value | int) -> None:
    """Writes an instruction for tiles. Python integers are registers."""
    arguments = [code.constant(I8, each) if isinstance(each, int) else each for each in operands]
    code.call(f"llvm.x86.{name}", VOID, *arguments)
