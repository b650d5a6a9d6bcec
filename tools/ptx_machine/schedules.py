"""In which order warps run, and when asynchronous effects happen.

The ISA promises no order but that of synchronisation. Each schedule is one legal order, drawn by a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Order = Literal["random", "late", "early", "priority", "slow_producer", "slow_consumer", "straggler"]
ORDERS: tuple[Order, ...] = (
    "random",
    "late",
    "early",
    "priority",
    "slow_producer",
    "slow_consumer",
    "straggler",
)


@dataclass(frozen=True)
class Schedule:
    """How a run is scheduled.

    Attributes:
        seed: of all choices.
        order: "random"; "late": asynchronous effects as late as possible; "early": as soon as possible;
            "priority": some warps run much more than others; "slow_producer": warps that start copies rarely
            run, copies are late; "slow_consumer": all other warps rarely run, copies are early; "straggler":
            one block, and one warp of each block, rarely run.
        garbage: what memory holds before it is written: all bits set, which are NaNs; random bytes; or zeros.
        resident: blocks that run at a time; None: all.
    """

    seed: int = 0
    order: Order = "random"
    garbage: Literal["nan", "random", "zero"] = "nan"
    resident: int | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r} is none of {', '.join(ORDERS)}")
        if self.garbage not in ("nan", "random", "zero"):
            raise ValueError(f"garbage {self.garbage!r} is none of nan, random, zero")
        if self.resident is not None and self.resident < 1:
            raise ValueError(f"resident is {self.resident}, must be at least 1")


RARELY = 1 / 64


class Scheduler:
    """Makes the choices of a schedule."""

    def __init__(self, how: Schedule) -> None:
        self.how = how
        self.random = random.Random(how.seed)
        self.noise = np.random.default_rng(how.seed)
        self.leader = self.random.randrange(32)  # elect.sync: any lane, but always the same for a mask
        self.turns = 0
        self.weights: dict[Any, float] = {}
        self.straggler = self.random.randrange(1 << 16)

    def garbage(self, size: int) -> np.ndarray:
        """[size] bytes."""
        if self.how.garbage == "nan":
            return np.full(size, 0xFF, np.uint8)
        if self.how.garbage == "zero":
            return np.zeros(size, np.uint8)
        return self.noise.integers(0, 256, size, dtype=np.uint8)

    def block(self, live: list[Any]) -> Any:
        """One of the resident blocks."""
        chosen = self.random.choice(live)
        if self.how.order == "straggler" and len(live) > 1 and self.random.random() > RARELY:
            behind = self.straggler % max(b.number + 1 for b in live)
            while chosen.number == behind:
                chosen = self.random.choice(live)
        return chosen

    def performs(self, spinning: bool) -> bool:
        """Whether an asynchronous effect happens now."""
        if spinning:  # a warp that polls must not starve what it waits for
            return self.random.random() < 0.5
        late = self.how.order in ("late", "slow_producer")
        return self.random.random() < (0.01 if late else 0.5)

    @property
    def eager(self) -> bool:
        return self.how.order in ("early", "slow_consumer")

    def warp(self, ready: list[Any]) -> Any:
        """One of the warps of a block that can run."""
        self.turns += 1
        order = self.how.order
        if order == "priority":
            if self.turns % 400 == 1:
                self.weights = {}
            if self.random.random() > 0.02:
                return max(ready, key=lambda w: self.weights.setdefault(w, self.random.random()))
        elif order != "random" and len(ready) > 1 and self.random.random() > RARELY:
            if order in ("slow_producer", "slow_consumer"):
                slow = order == "slow_producer"
                quick = [w for w in ready if w.produces != slow]
            elif order == "straggler":
                quick = [w for w in ready if w.number != self.straggler % w.block.warp_count]
            else:
                quick = ready
            ready = quick or ready
        return self.random.choice(ready)

    def spun(self, warp: Any) -> None:
        """A warp only repeats what failed: others come first."""
        if self.how.order == "priority":
            self.weights[warp] = 0.0

    def burst(self) -> int:
        """Steps that a warp runs at most."""
        return self.random.choice((1, 3, 10, 40, 200))

    def times_out(self) -> bool:
        """Whether a potentially blocking wait gives up at once."""
        return self.random.random() < 0.2
