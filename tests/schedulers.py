"""Schedulers from the fields of their cache and of their limits."""

from __future__ import annotations

from typing import Any

from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.shape import BatchLimits, CacheShape
from jengine.table.program_table import ProgramTable


def make_scheduler(table: ProgramTable, **fields: Any) -> Scheduler:
    """A scheduler from the fields of its cache and of its limits, and its other arguments, by name."""

    def taken(shape: Any) -> dict[str, Any]:
        return {name: fields.pop(name) for name in shape.__dataclass_fields__ if name in fields}

    return Scheduler(table, CacheShape(**taken(CacheShape)), BatchLimits(**taken(BatchLimits)), **fields)
