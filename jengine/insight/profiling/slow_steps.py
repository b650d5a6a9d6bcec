"""Finds steps that took much longer than similar ones, and their causes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from jengine.insight.explanations.finding import duration
from jengine.insight.profiling.data import ProcessProfile
from jengine.insight.recording.perfetto import stage_begins
from jengine.insight.recording.records import STAGES, StepRecord

# minimum duration of a slow iteration: factor over, and seconds beyond, the usual duration
FACTOR, EXCESS = 3.0, 0.02
FEWEST = 5  # minimum number of iterations of a program for a usual duration
EXPLAINS = 0.2  # minimum share of the excess time that a cause must account for
MOST = 10
NAMED = 0.1  # minimum share of an iteration for a stage to be named


class Turn(NamedTuple):
    """One iteration of the loop, from one step to the next, without idle time."""

    step: StepRecord
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Event(NamedTuple):
    """An event that may have delayed the loop.

    Attributes:
        kind: garbage_collection, lock, system_calls or interpreter_lock, as in the findings.
        text: its description in the report.
    """

    kind: str
    at: float
    seconds: float
    text: str

    def within(self, turn: Turn) -> float:
        """Seconds of it in an iteration."""
        return max(min(self.at + self.seconds, turn.end) - max(self.at, turn.begin), 0.0)


@dataclass(frozen=True, slots=True)
class SlowStep:
    """
    usual: usual seconds of an iteration with the same program.
    stages: seconds of the iteration by stage of the loop, the longest first.
    causes: (event, seconds of it in the iteration), the longest first. Empty: no measurement explains it.
    """

    turn: Turn
    usual: float
    stages: dict[str, float]
    causes: tuple[tuple[Event, float], ...]

    def __str__(self) -> str:
        head = (
            f"step {self.turn.step.number} ({self.turn.step.name}) took {duration(self.turn.seconds)} instead"
            f" of {duration(self.usual)}"
        )
        if not self.causes:
            return f"{head}: no measurement explains it; {self._parts()}"
        return f"{head}: " + "; ".join(
            f"{duration(seconds)} {event.text}" for event, seconds in self.causes[:3]
        )

    def _parts(self) -> str:
        """The stages that took much of it, and the seconds that belong to none."""
        least = NAMED * self.turn.seconds
        known = [f"{duration(seconds)} {stage}" for stage, seconds in self.stages.items() if seconds >= least]
        parts = [f"of which {', '.join(known)}"] if known else []
        missing = self.turn.seconds - sum(self.stages.values())
        return "; ".join([*parts, *([f"{duration(missing)} not accounted for"] if missing >= least else [])])


def turns(steps: list[StepRecord]) -> Iterator[Turn]:
    for step, after in pairwise([*steps, None]):
        assert step is not None
        end = step.ended + step.collect + step.text + step.away
        yield Turn(step, step.begun, end if after is None else min(after.begun, max(end, step.dispatched)))


def events(profile: ProcessProfile) -> list[Event]:
    """Events that may have delayed the loop, in order of time."""
    important, happened = {*profile.important}, list[Event]()
    for collection in profile.collections:
        text = f"of garbage collection (generation {collection.generation}, in thread {collection.thread})"
        happened.append(Event("garbage_collection", collection.begun, collection.seconds, text))
    for wait in profile.lock_waits:
        if wait.thread in important:
            by = f", held by {wait.holder}" if wait.holder else ""
            happened.append(
                Event("lock", wait.at, wait.seconds, f"waiting for the lock {wait.lock} in {wait.where}{by}")
            )
    for call in profile.slow_calls:
        if call.thread in important:
            where = f" in {call.where}" if call.where else ""
            happened.append(Event("system_calls", call.at, call.seconds, f"in calls of {call.name}{where}"))
    for late in profile.interpreter_waits:
        if late.holder and late.holder not in important:
            happened.append(
                Event(
                    "interpreter_lock",
                    late.at,
                    late.seconds,
                    f"in which thread {late.holder} had the interpreter",
                )
            )
    return sorted(happened, key=lambda event: event.at)


def slow_steps(profile: ProcessProfile) -> list[SlowStep]:
    """The slowest steps, in order of time."""
    trace = profile.steps
    if trace is None:
        return []
    every = [*turns(trace.steps)]
    usual = usual_seconds(every)
    slow = [turn for turn in every if turn.seconds > max(FACTOR * usual(turn), usual(turn) + EXCESS)]
    slow = sorted(slow, key=lambda turn: usual(turn) - turn.seconds)[:MOST]
    happened = events(profile)
    slow.sort(key=lambda turn: turn.begin)
    return [
        SlowStep(turn, usual(turn), _stages(turn, trace.steps), _causes(turn, usual(turn), happened))
        for turn in slow
    ]


def usual_seconds(every: Iterable[Turn]) -> Callable[[Turn], float]:
    """Usual seconds of an iteration with the same program, or of all if that program ran rarely."""
    by_program: dict[str, list[float]] = defaultdict(list)
    for turn in every:
        by_program[turn.step.name].append(turn.seconds)
    whole = [seconds for some in by_program.values() for seconds in some]
    medians = {name: median(some if len(some) >= FEWEST else whole) for name, some in by_program.items()}
    return lambda turn: medians[turn.step.name]


def _causes(turn: Turn, usual: float, happened: list[Event]) -> tuple[tuple[Event, float], ...]:
    pairs = [(event, event.within(turn)) for event in happened]
    long = [(event, seconds) for event, seconds in pairs if seconds >= EXPLAINS * (turn.seconds - usual)]
    return tuple(sorted(long, key=lambda pair: -pair[1]))


def _stages(turn: Turn, steps: list[StepRecord]) -> dict[str, float]:
    """Seconds of an iteration by stage, of the step that it dispatches and the one that it reads."""
    spent = dict.fromkeys(STAGES, 0.0)
    for step in steps:
        for stage, begin in stage_begins(step).items():
            spent[stage] += max(min(begin + getattr(step, stage), turn.end) - max(begin, turn.begin), 0.0)
    return dict(sorted(spent.items(), key=lambda pair: -pair[1]))
