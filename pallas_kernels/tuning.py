"""How a kernel's work is cut up: by rules from shapes and the device, or as a table of what was measured says.

`tuned.json` is the table, by device kind and by case; `python -m pallas_kernels.tune` fills it on a GPU.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

FILE = Path(__file__).parent / "tuned.json"
CORES = 132  # multiprocessors of an H100 or H200, for a device that does not say
BLOCKS = 2  # of threads that should be there for each multiprocessor
SPLIT_TOKENS = 256  # a split of a sequence should have as many
Table = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True)
class DecodeCase:
    """What decides how decode attention is cut up.

    Attributes:
        cache: dtype that is stored; the queries' own, int8 or uint8.
        dtype: of the queries.
        rows: of a step, padding included; cases differ by its next power of two.
        tokens: that a row may have to read. It bounds the splits, no more: all widths of a table share what was measured.
    """

    cache: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    rows: int
    tokens: int

    def key(self) -> str:
        facts = asdict(self) | {"rows": 1 << (self.rows - 1).bit_length()}
        return " ".join(f"{name}={value}" for name, value in facts.items() if name != "tokens")

    @property
    def most_splits(self) -> int:
        return max(1, self.tokens // SPLIT_TOKENS)


@dataclass(frozen=True)
class DecodeChoice:
    """How decode attention is cut up.

    Attributes:
        splits: of a sequence.
        stages: tiles on their way to a block at a time; None: as many as its shared memory is meant for.
    """

    splits: int
    stages: int | None = None


def cores(device: jax.Device | None) -> int:
    """Multiprocessors of the device."""
    return getattr(device, "core_count", None) or CORES


def default_decode(case: DecodeCase, cores: int) -> DecodeChoice:
    """Splits that fill the chip, where the tokens that a row may have to read suffice."""
    return DecodeChoice(max(1, min(BLOCKS * cores // (case.rows * case.kv_heads), case.most_splits)))


def decode(case: DecodeCase, device: jax.Device | None) -> DecodeChoice:
    """What was measured on such a device, else what the rules say."""
    measured = table().get(getattr(device, "device_kind", ""), {}).get(case.key())
    if not measured:
        return default_decode(case, cores(device))
    return DecodeChoice(**measured | {"splits": min(measured["splits"], case.most_splits)})


@functools.cache
def table() -> Table:
    found: Table = json.loads(FILE.read_text())
    return found


def updated(table: Table, device_kind: str, measured: dict[DecodeCase, DecodeChoice]) -> Table:
    """The table with new cases of a device, which replace those of the same key."""
    entries: dict[str, Any] = {case.key(): {k: v for k, v in asdict(choice).items() if v is not None} for case, choice in measured.items()}
    return table | {device_kind: table.get(device_kind, {}) | entries}
