"""What the strict device keeps for a slot."""

from __future__ import annotations

from dataclasses import dataclass, field

from jengine.scheduling.step_plan import SlotReset


@dataclass
class Slot:
    """A slot's state. Its block tables, by cache group, are cleared on reset: stale entries are detected."""

    reset: SlotReset
    tables: list[dict[int, int]]
    tokens: list[int] = field(default_factory=list)  # whose keys and values are in the cache
    last: tuple[int, int] | None = None  # the token that the next row reads, and its position
    step: int = 0  # number of the step that sampled it
