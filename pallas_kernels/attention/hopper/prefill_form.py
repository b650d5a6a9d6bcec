"""Rules that choose, by shape, how the Hopper kernel for prefill attention uses registers and shared
memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.mosaic.hopper import COLUMNS, ROWS

STAGE_BYTES = 1 << 17  # bytes of keys and values in flight per block
# bytes of shared memory per block; of these for barriers, scales and alignment
MAX_SHARED, OVERHEAD = 232448, 6400


@dataclass(frozen=True)
class Form:
    """The form of the kernel.

    Attributes:
        warpgroups: compute warpgroups of a thread block, which share its keys and values.
        shares: items into which the rows of a tile and a kv head are divided.
        block_k: keys per stage.
        stages: stages in flight.
        columns: columns of a result that are staged in shared memory at a time.
        overlap: the scores of a block of keys are computed before the product with the previous block's
            values.
        registers: per thread of compute warpgroups, and per thread of memory warpgroups. With two compute
            warpgroups, they fill a multiprocessor.
    """

    warpgroups: int
    shares: int
    block_k: int
    stages: int
    columns: int
    overlap: bool
    registers: tuple[int, int]


def form_of(
    rows: int,
    head_dim: int,
    page_size: int,
    *,
    eight_bits: bool,
    block_k: int | None = None,
    stages: int | None = None,
) -> Form:
    """The form for a tile with this many rows, (head, token) pairs, per kv head. block_k and stages override
    the rules.
    """
    units = -(-rows // ROWS)
    warpgroups = min(units, 2)
    small = eight_bits and page_size < 32  # many copies and conversions, one per page
    # With one compute warpgroup, half of the registers are free for another block, which hides the same
    # latencies.
    overlap = warpgroups == 2 and head_dim <= 128
    block_k = block_k or (128 if overlap and not small else 64)
    columns = COLUMNS if eight_bits or head_dim == 256 else head_dim
    stage, raw = 4 * block_k * head_dim, 2 * block_k * head_dim * eight_bits
    room = MAX_SHARED - OVERHEAD - 2 * warpgroups * ROWS * (head_dim + columns) - raw
    stages = stages or min(max(2, STAGE_BYTES * warpgroups // 2 // stage), room // stage)
    return Form(
        warpgroups,
        -(-units // warpgroups),
        block_k,
        stages,
        columns,
        overlap,
        (208, 88) if small else (224, 56),
    )
