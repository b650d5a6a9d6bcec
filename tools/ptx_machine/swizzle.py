"""Swizzled addresses of shared memory (PTX ISA, "Swizzling modes")."""

from __future__ import annotations

from tools.ptx_machine.numbers import Array

WIDTHS = (16, 32, 64, 128)  # bytes of a line of the pattern; 16: none


def swizzled[Address: (int, Array)](address: Address, width: int) -> Address:
    """Where the bytes of an address lie: bits 7 to 9 change bits 4 to 6; fewer of them in widths below 128.

    It depends on the address in shared memory, not on the place in a tile. It is its own inverse.
    """
    return address ^ ((address >> 7 & width // 16 - 1) << 4)


def period(width: int) -> int:
    """Bytes after which the pattern repeats."""
    return 8 * width
