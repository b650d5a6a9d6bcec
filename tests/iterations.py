"""Counts iterations of loops, so that tests can assert bounds on work without a clock."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

import jengine

PACKAGE = str(Path(jengine.__file__).parent)
TOOL = sys.monitoring.PROFILER_ID


class TooManyIterations(BaseException):
    """Not an Exception: code that survives faults must not survive this one."""


@contextmanager
def counted_iterations(limit: int = 1_000_000) -> Iterator[Counter[str]]:
    """Yields the iterations of loops of jengine's modules so far, by the module's name. Comprehensions count.

    Raises:
        TooManyIterations: in the loop that exceeds the limit, so that an endless one ends.
    """
    monitoring, counts, total = sys.monitoring, Counter[str](), 0
    names: dict[CodeType, str] = {}

    def jump(code: CodeType, offset: int, destination: int) -> object:
        nonlocal total
        if destination > offset or not code.co_filename.startswith(PACKAGE):
            return monitoring.DISABLE
        if code not in names:
            names[code] = Path(code.co_filename).stem
        counts[names[code]] += 1
        total += 1
        if total > limit:
            raise TooManyIterations(f"more than {limit} iterations: {counts}")
        return None

    monitoring.use_tool_id(TOOL, "iterations")
    monitoring.register_callback(TOOL, monitoring.events.JUMP, jump)
    monitoring.set_events(TOOL, monitoring.events.JUMP)
    try:
        yield counts
    finally:
        monitoring.set_events(TOOL, 0)
        monitoring.register_callback(TOOL, monitoring.events.JUMP, None)
        monitoring.free_tool_id(TOOL)
