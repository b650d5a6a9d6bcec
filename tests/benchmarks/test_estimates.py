"""Estimates: what is compiled is kept, so that a run which was ended goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import estimates
from jengine.capacity.planning.compiled import Compiled
from jengine.capacity.planning.hlo import parse
from jengine.execution.memory import ProgramMemory
from jengine.table.program_table import TrunkKey

TEXT = (
    "HloModule one\n\nENTRY %main (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n  ROOT %y ="
    " f32[4]{0} negate(%x)\n}\n"
)


def test_programs_are_kept_for_as_long_as_sources_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def compiled(spec: Any, keys: list[Any], *, threads: int, progress: bool) -> list[Compiled]:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.extend(keys)
        return [Compiled(key, 1.0, ProgramMemory(0, 0, 0, 0, 0), parse(TEXT), 1) for key in keys]

    def take(*rows: int) -> list[Compiled]:
        spec: Any = None
        return [estimates.kept("8b-1", spec, TrunkKey(row, 0), tmp_path) for row in rows]

    monkeypatch.setattr(estimates, "compiled", compiled)
    monkeypatch.setattr(estimates, "sources", lambda: "these")
    with pytest.raises(KeyboardInterrupt):
        take(1, 8, 32)
    assert [one.key for one in take(1, 8)] == asked == [TrunkKey(1, 0), TrunkKey(8, 0)]
    assert take(8)[0].program == parse(TEXT)
    monkeypatch.setattr(estimates, "sources", lambda: "others")
    with pytest.raises(KeyboardInterrupt):
        take(8)
