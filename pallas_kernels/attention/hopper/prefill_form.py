"""Rules that choose, by shape, how the Hopper kernel for prefill attention uses registers and shared
memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.mosaic.hopper import COLUMNS, ROWS

STAGE_BYTES = 1 << 17  # bytes of keys and values in flight per block
# bytes of shared memory per block; of these for barriers and alignment, and for scales
MAX_SHARED, OVERHEAD, SCALES = 232448, 2048, 4352


@dataclass(frozen=True)
class Form:
    """The form of the kernel.

    Attributes:
        rows: (head, token) pairs of a compute warpgroup.
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

    rows: int
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
    of_warpgroup: int = ROWS,
    max_warpgroups: int = 2,
) -> Form:
    """The form for a tile with this many rows, (head, token) pairs, per kv head. block_k and stages override
    the rules.

    Args:
        of_warpgroup: rows of a compute warpgroup.
        max_warpgroups: compute warpgroups of a block.
    """
    units = -(-rows // of_warpgroup)
    warpgroups = min(units, max_warpgroups)
    small = eight_bits and page_size < 32  # many copies and conversions, one per page
    # With one compute warpgroup, half of the registers are free for another block, which hides the same
    # latencies.
    overlap = warpgroups == 2 and head_dim <= 128
    block_k = block_k or (128 if overlap and not small else 64)
    columns = COLUMNS if eight_bits or head_dim == 256 or of_warpgroup > ROWS else head_dim
    stage, raw = 4 * block_k * head_dim, (2 * block_k * head_dim + SCALES) * eight_bits
    room = MAX_SHARED - OVERHEAD - 2 * warpgroups * of_warpgroup * (head_dim + columns) - raw
    stages = stages or min(max(2, STAGE_BYTES * warpgroups // 2 // stage), room // stage)
    return Form(
        of_warpgroup,
        warpgroups,
        -(-units // warpgroups),
        block_k,
        stages,
        columns,
        overlap,
        (208, 88) if small else (224, 56),
    )
