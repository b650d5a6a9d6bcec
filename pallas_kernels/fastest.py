"""Which implementation of decode attention was measured to be the fastest, by device kind and case.

`fastest.json` is the table; `python -m pallas_kernels.tune` fills it on a GPU where another implementation
than ours is installed.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).parent / "fastest.json"
OURS = "mosaic"
# microseconds of a call, by device kind, case and implementation
Table = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Case:
    """What decides which is faster.

    Attributes:
        dtype: of queries and cache.
        rows: of a step, padding included; cases differ by its next power of two.
    """

    dtype: str
    heads: int
    kv_heads: int
    page_size: int
    head_dim: int
    rows: int

    def key(self) -> str:
        facts = asdict(self) | {"rows": 1 << (self.rows - 1).bit_length()}
        return " ".join(f"{name}={value}" for name, value in facts.items())


def takes(impl: str, case: Case | None, device_kind: str) -> bool:
    """Whether `impl` was the fastest on such a device in this case, or in any (None). Where nothing was
    measured, ours is.
    """
    measured = table().get(device_kind, {})
    times = measured.values() if case is None else [measured.get(case.key()) or {OURS: 0.0}]
    return any(min(of, key=of.__getitem__) == impl for of in times)


def updated(table: Table, device_kind: str, case: Case, times: dict[str, float]) -> Table:
    """The table with a case of a device, which replaces the one of the same key."""
    return table | {device_kind: table.get(device_kind, {}) | {case.key(): times}}


def read(file: Path) -> Table:
    """Empty where there is no file."""
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def text(table: Table) -> str:
    """Of a file."""
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


@functools.cache
def table() -> Table:
    return read(FILE)
