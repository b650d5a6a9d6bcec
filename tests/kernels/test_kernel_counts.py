"""What tiles cost in the machine code of kernels; `test_blackwell` has its products."""

from __future__ import annotations

import json

import pytest
from kernel_counts import PRODUCT, blocks_of, every, instructions
from kernel_facts import AMPERE

from benchmarks.machine import RESULTS
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


@pytest.mark.parametrize("jump", ["@P1 BRA", "@!UP2 BRA", "BRA.U UP0,", "BRA.U !UP0,", "BRA.DIV UR4,"])
def test_a_jump_may_depend_on_a_condition(jump: str) -> None:
    first, *_ = blocks_of(f"/*0000*/ {jump} `(.L_x_0)\n/*0010*/ EXIT\n.L_x_0:\n/*0020*/ EXIT")
    assert first.following == (2, 1)
    assert blocks_of("/*0000*/ BRA `(.L_x_0)\n.L_x_0:\n/*0010*/ EXIT")[0].following == (1,)


LIMITS = {  # at most: instructions that multiply, that copy or convert, waits; at least: tiles at a time
    "int8, 8 rows": (102.5, 1.5, 0.5, 4),
    "fp8, 8 rows": (102.5, 1.5, 0.5, 4),
    "fp8, 64 rows": (95.5, 6.5, 0.5, 2),
    "fp8, 256 rows": (98, 11.5, 1, 2),
    "fp8 x fp8, 8 rows": (27.5, 4.5, 0.5, 4),
    "fp8 x fp8, both in groups of 128, 8 rows": (35.5, 4, 0.5, 4),
    "fp8 x fp8, both in groups of 128, 64 rows": (73, 4.5, 0.5, 2),
    "int4, groups of 32, 8 rows": (127, 2, 1, 4),
    "int4, groups of 32, 256 rows": (134, 7, 1, 2),
    "int4, groups of 128, offsets, 16 rows": (165.5, 2.5, 1, 4),
    "MXFP4, 8 rows": (147, 2, 1, 4),
    "MXFP4, 64 rows": (147, 2.5, 1, 2),
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


# of a warp for a tile, at most, on an A100, RTX 3090, L4, B200 and RTX 5090
ELSEWHERE = {
    "int4, groups of 128, 8 rows": (166, 166, 166, 176, 167),
    "MXFP4, 8 rows": (177, 177, 177, 188, 184),
    "NVFP4, 8 rows": (195, 195, 195, 206, 198),
    "int8, 8 rows": (162, 162, 162, 178, 178),
    "fp8, 8 rows": (193, 193, 193, 213, 207),
    "decode, head dim 128": (149, 149, 149, 144, 160),
    "decode, int8, head dim 128": (419, 419, 419, 415, 431),
    "prefill, head dim 128": (410, 410, 410, 389, 481),
    "latent decode, 16 heads": (355, 355, 355, 338, 386),
    "latent prefill, 16 heads": (414, 413, 413, 387, 454),
}
PROMPTS = {  # by tcgen05 on a B200: of a warp for its 32 rows and 64 tokens
    "prompts, head dim 64": 378,
    "prompts, head dim 128": 438,
    "prompts, head dim 256": 544,
    "prompts, head dim 128, fp8, pages of 16, window, cap": 1032,
}


def test_tiles_of_the_record_cost_no_more_than_before() -> None:
    """Other tests compare the record with what is compiled: `test_ampere` and its like."""
    targets = json.loads((RESULTS / "compiled_kernels.json").read_text())["targets"]
    counts = {
        (target, row["case"]): row["instructions"]
        for target, rows in targets.items()
        for row in rows
        if "instructions" in row
    }
    order = "a100", "rtx3090", "l4", "b200", "rtx5090"
    limits = {
        (target, name): limit
        for name, of_targets in ELSEWHERE.items()
        for target, limit in zip(order, of_targets, strict=True)
    } | {("b200", name): limit for name, limit in PROMPTS.items()}
    assert {*order} == {*AMPERE} == {*targets}
    assert {case: counts[case] for case, limit in limits.items() if counts[case] > limit} == {}
