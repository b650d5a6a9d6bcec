"""Totals over all steps since an engine's start, for metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from jengine.insight.recording.records import STAGES, StepRecord

TOKENS = tuple(2**power for power in range(15))  # upper bounds of the histogram of a step's tokens


class StepTotals(msgspec.Struct, array_like=True, frozen=True):
    """Totals since the engine's start.

    Attributes:
        steps: number of steps by the rows and tiles of their trunk, such as "8+1".
        seconds: of the loop, by stage.
        device_seconds: of the steps whose device time is known; predicted_seconds: for the same steps.
        rows, padded_rows: rows that held a token, and rows that were padding.
        prompt_tokens, padded_tokens: the same for the tokens of tiles.
        tokens: histogram of steps by computed tokens without padding: at most TOKENS[i], and a last bin for
            more.
        resident: current bytes of the engine's process.
        pause_seconds, pauses: of its garbage collector: seconds, and numbers by generation.
    """

    steps: dict[str, int] = {}
    seconds: dict[str, float] = {}
    device_seconds: float = 0.0
    predicted_seconds: float = 0.0
    rows: int = 0
    padded_rows: int = 0
    prompt_tokens: int = 0
    padded_tokens: int = 0
    tokens: tuple[int, ...] = (0,) * (len(TOKENS) + 1)
    resident: int = 0
    pause_seconds: float = 0.0
    pauses: tuple[int, ...] = (0, 0, 0)

    @property
    def token_bounds(self) -> tuple[int, ...]:
        """Upper bounds for `tokens`."""
        return TOKENS

    def plus(self, records: Iterable[StepRecord], tile_size: int) -> StepTotals:
        """The totals with these steps added."""
        steps: Counter[str] = Counter()
        seconds, tokens = dict.fromkeys(STAGES, 0.0), [0] * (len(TOKENS) + 1)
        device = predicted = 0.0
        rows = padded_rows = prompt_tokens = padded_tokens = 0
        for record in records:
            steps[f"{record.trunk.rows}+{record.trunk.tiles}"] += 1
            for stage in STAGES:
                seconds[stage] += getattr(record, stage)
            if record.device:
                device += record.device
                predicted += record.predicted
            rows += record.rows * record.steps
            padded_rows += record.padded_rows * record.steps
            prompt_tokens += record.prompt_tokens
            padded_tokens += record.padded_tokens(tile_size)
            tokens[bisect_left(TOKENS, record.rows * record.steps + record.prompt_tokens)] += 1
        return self + StepTotals(
            dict(steps),
            seconds,
            device,
            predicted,
            rows,
            padded_rows,
            prompt_tokens,
            padded_tokens,
            tuple(tokens),
        )

    def of_process(self, resident: int, pause_seconds: float, pauses: list[int]) -> StepTotals:
        """The totals with these facts of the process."""
        return msgspec.structs.replace(
            self, resident=resident, pause_seconds=pause_seconds, pauses=tuple(pauses)
        )

    def __add__(self, other: StepTotals) -> StepTotals:
        """The sum of both. Memory is taken from the second."""

        def added(name: str) -> Any:
            mine, its = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                return {key: mine.get(key, 0) + its.get(key, 0) for key in mine | its}
            return (
                tuple(a + b for a, b in zip(mine, its, strict=True))
                if isinstance(mine, tuple)
                else mine + its
            )

        sums: dict[str, Any] = {name: added(name) for name in self.__struct_fields__}
        return StepTotals(**{**sums, "resident": other.resident})
