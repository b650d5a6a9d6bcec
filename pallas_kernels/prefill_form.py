"""How the Hopper kernel for prefill attention uses a multiprocessor's registers and shared memory, by rules from shapes."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.hopper import COLUMNS, ROWS

STAGE_BYTES = 1 << 17  # of keys and values in flight in a block
MAX_SHARED, OVERHEAD = 232448, 6400  # bytes of shared memory per block; those for barriers, scales and alignment


@dataclass(frozen=True)
class Form:
    """The form of the kernel.

    Attributes:
        warpgroups: compute warpgroups of a block, which share its keys and values.
        shares: items into which the rows of a tile and a kv head are divided.
        block_k: keys of a stage.
        stages: stages in flight.
        columns: columns of a result that are staged in shared memory at a time.
        overlap: the scores of a block of keys are multiplied before the values of the block before.
        registers: per thread of compute and memory warpgroups. Two compute warpgroups with these fill a multiprocessor.
    """

    warpgroups: int
    shares: int
    block_k: int
    stages: int
    columns: int
    overlap: bool
    registers: tuple[int, int]


def form_of(rows: int, head_dim: int, page_size: int, *, eight_bits: bool, block_k: int | None = None, stages: int | None = None) -> Form:
    """The form for a tile with this many rows, (head, token) pairs, per kv head; block_k and stages as given, if not None."""
    units = -(-rows // ROWS)
    warpgroups = min(units, 2)
    small = eight_bits and page_size < 32  # one copy and one conversion for each of many pages
    # One compute warpgroup leaves half of the registers to another block, which hides the same latencies.
    overlap = warpgroups == 2 and head_dim <= 128
    block_k = block_k or (128 if overlap and not small else 64)
    columns = COLUMNS if eight_bits or head_dim == 256 else head_dim
    stage, raw = 4 * block_k * head_dim, 2 * block_k * head_dim * eight_bits
    room = MAX_SHARED - OVERHEAD - 2 * warpgroups * ROWS * (head_dim + columns) - raw
    stages = stages or min(max(2, STAGE_BYTES * warpgroups // 2 // stage), room // stage)
    return Form(warpgroups, -(-units // warpgroups), block_k, stages, columns, overlap, (208, 88) if small else (224, 56))
