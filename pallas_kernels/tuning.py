"""Parameters of kernels on a device: from rules by shape and device, or from a table of measurements.

The table is `tuned.json`, indexed by device kind and case; `python -m pallas_kernels.tune` fills it on a GPU.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

FILE = Path(__file__).parent / "tuned.json"
CORES = 132  # multiprocessors of an H100 or H200, for devices that do not report it
BLOCKS = 2  # desired blocks per multiprocessor
Table = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True)
class DecodeCase:
    """The parameters on which the stages of decode attention depend.

    Attributes:
        cache: stored dtype; the queries' dtype, int8 or uint8.
        dtype: dtype of the queries.
        rows: rows of a step, padding included; rounded up to a power of two for the lookup.
    """

    cache: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    rows: int

    def key(self) -> str:
        facts = asdict(self) | {"rows": 1 << (self.rows - 1).bit_length()}
        return " ".join(f"{name}={value}" for name, value in facts.items())


@dataclass(frozen=True)
class DecodeChoice:
    """The depth of decode attention's copy pipeline.

    Attributes:
        stages: tiles in flight per block; None: as many as fit into the block's budget of shared memory.
    """

    stages: int | None = None


def cores(device: jax.Device | None) -> int:
    """Number of multiprocessors of the device."""
    return getattr(device, "core_count", None) or CORES


def decode_blocks(cache: str, head_dim: int, device: jax.Device | None) -> int:
    """Thread blocks of a work list of decode attention: as many as the device runs at a time, for any number
    of rows.

    Args:
        cache: stored dtype.
    """
    itemsize = jax.numpy.dtype(cache).itemsize
    return cores(device) * (BLOCKS if head_dim <= 64 * itemsize else 1)


def decode(case: DecodeCase, device: jax.Device | None) -> DecodeChoice:
    """The measured choice for this kind of device, or the default."""
    return DecodeChoice(**table().get(getattr(device, "device_kind", ""), {}).get(case.key(), {}))


@functools.cache
def table() -> Table:
    found: Table = json.loads(FILE.read_text())
    return found


def updated(table: Table, device_kind: str, measured: dict[DecodeCase, DecodeChoice]) -> Table:
    """The table with new cases of a device, which replace those with the same key."""
    entries: dict[str, Any] = {
        case.key(): {k: v for k, v in asdict(choice).items() if v is not None}
        for case, choice in measured.items()
    }
    return table | {device_kind: table.get(device_kind, {}) | entries}
