"""What operations have made of an engine, for another one that takes its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from jengine.core.weights import Tag
from jengine.engine.operations import LoadWeights, Operation, Pause, Resume, SetStrategy, Sleep, WakeUp


@dataclass(slots=True)
class EngineState:
    """The state that an engine which takes the place of another must have.

    Attributes:
        strategy: the last one that was set, if any.
        weights: the last ones from a folder, with their version; None: those of the start.
        has_weights: False after sleep at level 2.
        paused: by Pause, not only by Sleep.
        asleep: what Sleep has freed.
    """

    strategy: SetStrategy | None = None
    weights: LoadWeights | None = None
    has_weights: bool = True
    paused: bool = False
    asleep: frozenset[Tag] = frozenset()

    def note(self, operation: Operation[Any], answer: Any) -> None:
        """An engine has done an operation, with this answer."""
        match operation:
            case SetStrategy():
                self.strategy = operation
            case LoadWeights():
                self.weights, self.has_weights = replace(operation, version=answer), True
                self.asleep -= {"weights"}
            case Pause() | Resume():
                self.paused = isinstance(operation, Pause)
            case Sleep(level=level, tags=tags) if answer:
                if "weights" in {*tags} - self.asleep:
                    self.has_weights &= level == 1
                self.asleep |= {*tags}
            case WakeUp(tags=tags):
                self.asleep -= {*tags}

    def operations(self) -> list[Operation[Any]]:
        """What brings a new engine to this state. Until it has its weights, requests wait."""
        out: list[Operation[Any]] = [] if self.strategy is None else [self.strategy]
        if self.paused:
            out.append(Pause("keep"))
        asleep = self.asleep
        if self.weights is not None or not self.has_weights:
            out.append(Sleep(2, "keep", ("weights",)))
            if self.has_weights and self.weights is not None:
                out.append(self.weights)
            elif "weights" not in asleep:
                out.append(WakeUp(("weights",)))
            else:
                asleep -= {"weights"}
        return [*out, Sleep(1, "keep", tuple(sorted(asleep)))] if asleep else out
