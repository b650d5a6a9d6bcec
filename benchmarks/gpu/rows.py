"""The results of a part of the suite: rows, which are printed as a table and merged with earlier results."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pallas_kernels

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu_suite.json"
FAILED, SKIPPED = "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Row:
    """One case.

    Attributes:
        values: by column; text, or a number in the unit that the column names.
        goal: minimum of the column `share`; None: no goal.
        outcome: ok, failed or skipped; if empty, the goal decides.
        why: reason of a failure or a skip.
    """

    case: str
    values: dict[str, Any] = field(default_factory=dict)
    goal: float | None = None
    outcome: str = ""
    why: str = ""

    @property
    def judged(self) -> str:
        if self.outcome or self.goal is None:
            return self.outcome
        return "met" if self.values["share"] >= self.goal else "missed"

    def data(self) -> dict[str, Any]:
        """The row as JSON."""
        values = {
            name: str(value) if value in (math.inf, -math.inf) or value != value else value
            for name, value in self.values.items()
        }
        extra = {"goal": self.goal, "outcome": self.judged, "why": self.why}
        return {
            "case": self.case,
            **values,
            **{name: value for name, value in extra.items() if value not in (None, "")},
        }


def skipped(case: str, why: str) -> Row:
    return Row(case, outcome=SKIPPED, why=why)


def failed(case: str, why: str, **values: Any) -> Row:
    return Row(case, values, outcome=FAILED, why=why)


def attempt(case: str, measure: Callable[[], Row], otherwise: Callable[[str, str], Row] = failed) -> Row:
    """Returns measure's row, or a row for the exception that a compiler, a device or a library raised, so
    other cases can run.
    """
    try:
        return measure()
    except Exception as error:
        return otherwise(case, reason(error))


def reason(error: Exception) -> str:
    """An exception's type and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def table(entries: list[dict[str, Any]]) -> str:
    """A table of the results of `Row.data`: all columns that any row has, then the goal, the outcome and the
    reason.
    """
    names = dict.fromkeys(name for entry in entries for name in entry)
    last = [name for name in ("goal", "outcome", "why") if name in names]
    columns = [name for name in names if name not in last] + last
    lines = [columns, *([_text(entry.get(name, "")) for name in columns] for entry in entries)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    left = (0, len(columns) - 1) if "why" in names else (0,)

    def cell(text: str, i: int) -> str:
        return text.ljust(widths[i]) if i in left else text.rjust(widths[i])

    return "\n".join("  ".join(cell(text, i) for i, text in enumerate(line)).rstrip() for line in lines)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def read(file: Path) -> dict[str, Any]:
    """Results by part, empty if the file does not exist."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def merged(
    results: dict[str, Any], part: str, machine: dict[str, Any], rows: Iterable[Row], stopped: str | None
) -> dict[str, Any]:
    """The results with this part's results replaced.

    Args:
        stopped: why rows may be missing; None if the part is complete.
    """
    entry = {"machine": machine, "sources": sources(), "rows": [row.data() for row in rows]}
    return {**results, part: entry | ({} if stopped is None else {"stopped": stopped})}


def write(file: Path, results: dict[str, Any]) -> None:
    """Writes the file atomically: if the process is killed, the old file remains."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(file)


def checked(results: dict[str, Any]) -> bool:
    """Whether the part `correctness` was run with these kernels, on a GPU."""
    entry = results.get("correctness", {})
    return (
        bool(entry.get("rows")) and entry["sources"] == sources() and entry["machine"]["devices"] != ["cpu"]
    )


def failures(results: dict[str, Any], part: str) -> int:
    """Cases of a part that failed."""
    return [entry.get("outcome") for entry in results[part]["rows"]].count(FAILED)


def sources() -> str:
    """A digest of the kernels' source files."""
    digest = hashlib.sha256()
    kernels = Path(pallas_kernels.__file__).parent
    for path in sorted(kernels.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
