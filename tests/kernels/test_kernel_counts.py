"""What tiles cost in the machine code of Hopper's kernels; `test_blackwell` has those of its products."""

from __future__ import annotations

import pytest
from kernel_counts import PRODUCT, blocks_of, every, instructions

from tests.extras import compiler_for_gpus

CODE = """
.text.kernel:
        /*0000*/                   MOV R1, R2
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R4
        /*0020*/              @!P1 BRA `(.L_x_1)
.L_x_2:
        /*0030*/                   HGMMA.64x8x16.F32.BF16 R32, R40, gdesc[UR4], R32
        /*0040*/                   HGMMA.64x8x16.F32.BF16 R32, R44, gdesc[UR4], R32, gsb0
        /*0050*/               @P2 BRA `(.L_x_3)
        /*0060*/                   FADD R1, R1, R2
        /*0070*/                   FADD R1, R1, R2
.L_x_3:
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0
        /*00a0*/                   BRA.U UP1, `(.L_x_0)
        /*00b0*/                   EXIT
.L_x_1:
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R3+URZ], R0
        /*00d0*/              @!P1 NANOSLEEP.SYNCS 0x989680
        /*00e0*/              @!P1 BRA `(.L_x_1)
        /*00f0*/                   BRA `(.L_x_2)
"""


@pytest.mark.parametrize("tiles", [1, 2])
def test_the_shortest_way_through_a_loop_is_counted(tiles: int) -> None:
    blocks = blocks_of(CODE)
    assert instructions(blocks, PRODUCT, 2 / tiles) == (8 / tiles, 1 / tiles)
    assert instructions(blocks, "FADD", 1) == (5, 0.5), "of two"


LIMITS = {  # at most: instructions that multiply, that copy or convert, waits; at least: tiles at a time
    "int8, 8 rows": (102.5, 1.5, 0.5, 4),
    "fp8, 8 rows": (102.5, 1.5, 0.5, 4),
    "fp8 x fp8, 8 rows": (27.5, 4.5, 0.5, 4),
    "fp8 x fp8, both in groups of 128, 8 rows": (35.5, 4, 0.5, 4),
    "fp8 x fp8, both in groups of 128, 64 rows": (73, 4.5, 0.5, 2),
    "MXFP4, 8 rows": (147, 2, 1, 4),
    "MXFP4, 64 rows": (147, 2, 1, 2),
    "decode attention, cache in bfloat16": (261, 45, 3, 2),
    "decode attention, cache in int8": (327, 323, 3, 1),
    "decode attention, cache in float8_e4m3fn": (327, 273, 3, 1),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_tile_costs_no_more_than_before(name: str) -> None:
    compiler_for_gpus()
    count = dict(every())[name]()
    multiply, copy, waits, tiles = LIMITS[name]
    assert count.products <= multiply and count.copies <= copy
    assert count.waits <= waits and count.chains >= tiles
