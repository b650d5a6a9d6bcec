"""Several ranks as one engine, each with a scheduler and a cache; they share experts and run together."""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from functools import reduce

from jengine.base.errors import InvalidArgument
from jengine.core.request import FinishReason, Request
from jengine.core.updates import Load, Update, combined
from jengine.core.weights import Version
from jengine.engine.loop.engine import Engine
from jengine.engine.loop.turns import ended
from jengine.engine.operations import Operation, Sleep, WakeUp, WriteProfile
from jengine.execution.ranks import RanksRunner
from jengine.execution.runner import InFlight
from jengine.insight.recording.records import StepTotals
from jengine.scheduling.forecasts.expectations import expect, hypothetical
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.scheduler import Scheduler
from jengine.table.program_table import TrunkKey
from jengine.table.ready_programs import ReadyPrograms

IDLE_SECONDS = 0.001  # between two looks at ranks that wait for pages or for more requests


class RankedEngine:
    """Engines that serve as one. A prompt goes to the rank that is predicted to give its first token soonest.

    In each iteration every rank plans. One program then runs the steps of all: the smallest trunk that has
    room for each. Ranks without a step join with padding. If the table has no such trunk, there are two
    programs: for the ranks with prompts, and for the others.

    With several stages, each iteration runs one cohort of each rank. A step that must wait for tokens of a
    step in flight, such as that of a lone sequence, is planned only if no rank has anything else to run.

    An operation is done by every rank, and its `joined` gives the answer; a profile of the process is made by
    the first one. Costs and traces are the first one's.

    Args:
        ranks: with the same options.
    """

    def __init__(self, ranks: List[Engine], runner: RanksRunner) -> None:
        self.ranks, self.runner, first = ranks, runner, ranks[0]
        self.pages: None = None  # none travel
        self.limits, self.weights, self.on_host = first.limits, first.weights, first.on_host
        self.costs, self.trace = first.costs, first.trace

    def add(self, *requests: Request) -> list[Sequence]:
        for rank in self.ranks:
            rank.scheduler.registry.check_id(requests[0].request_id)
        return self._best(requests).add(*requests)

    def _best(self, requests: List[Request]) -> Engine:
        """The rank with the soonest first token; of equals, the one with fewer requests."""

        def seconds(rank: Engine) -> tuple[float, int]:
            asked = hypothetical(rank.scheduler, requests[0], len(requests))
            registry = rank.scheduler.registry
            return expect(rank.scheduler, [asked])[0].first_token, len(registry.by_id)

        return min(self.ranks, key=seconds)

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        return any([rank.end(request_id, reason, stop_reason) for rank in self.ranks])

    def step(self) -> list[Update]:
        oldest = self._agree_to_wait()
        turns = {i: rank.turn(waits=False) for i, rank in enumerate(self.ranks)}
        wanted = {i: want for i, turn in turns.items() if (want := next(turn)) is not None}
        updates, begun = list[Update](), dict[int, InFlight]()
        ready = self.ranks[0].scheduler.predictor.ready
        for key, members in agreed({i: want.plan.trunk for i, want in wanted.items()}, ready):
            plans = {i: wanted[i].plan for i in members}
            for plan in plans.values():
                plan.trunk, plan.sampler = key, ready.sampler(key, plan.sampler.variant)
            started = self.runner.begin_all(plans, key)
            masked = [i for i in started if wanted[i].masked]
            begun |= {i: self.runner.runners[i].sample(started[i]) for i in started if i not in masked}
            for i in masked:  # computes its mask while the trunk runs
                updates += ended(turns.pop(i), started[i])
        for i, turn in turns.items():
            cohorts = self.ranks[i].scheduler.cohorts
            if wanted and i not in wanted:
                cohorts.passed()
            updates += ended(turn, begun.get(i) or ("passed" if wanted or cohorts.oldest > oldest else None))
        if not wanted and not updates:
            time.sleep(IDLE_SECONDS)
        return updates

    def _agree_to_wait(self) -> float:
        """Decides which ranks may plan a step that waits for the oldest in flight; returns its number."""
        schedulers = [rank.scheduler for rank in self.ranks]
        oldest = min([scheduler.cohorts.oldest for scheduler in schedulers])
        if schedulers[0].cohorts.stages > 1:
            ready = any([scheduler.rows.ready for scheduler in schedulers])
            for scheduler in schedulers:
                scheduler.cohorts.waits = not ready and scheduler.cohorts.oldest == oldest
        return oldest

    def do[T](self, operation: Operation[T]) -> T:
        if isinstance(operation, Sleep | WakeUp):
            raise InvalidArgument(
                "operation", type(operation).__name__, "not with several ranks (data_parallel_size)"
            )
        ranks = self.ranks[:1] if isinstance(operation, WriteProfile) else self.ranks
        return operation.joined([rank.do(operation) for rank in ranks])

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the rank that would get a new request of which nothing is cached."""

        def seconds(rank: Engine) -> float:
            return rank.load.first_token_seconds or 0.0

        return min(self.ranks, key=seconds).scheduler

    @property
    def has_work(self) -> bool:
        return any([rank.has_work for rank in self.ranks])

    @property
    def has_requests(self) -> bool:
        return any([rank.has_requests for rank in self.ranks])

    @property
    def load(self) -> Load:
        """The sum of the ranks' loads, with the soonest first token."""
        return combined([rank.load for rank in self.ranks])

    def totals(self) -> StepTotals:
        return reduce(StepTotals.__add__, [rank.totals() for rank in self.ranks])

    def memory_parts(self) -> dict[str, int]:
        return self.runner.memory_parts()

    @property
    def weights_version(self) -> Version:
        return self.weights.version

    @property
    def compiles_since_start(self) -> int:
        return self.ranks[0].compiles_since_start

    def passed_on(self) -> None:
        for rank in self.ranks:
            rank.passed_on()

    def settle(self) -> None:
        for rank in self.ranks:
            rank.settle()

    @property
    def has_unused_programs(self) -> bool:
        return False

    def wait_until_compiled(self, timeout: float | None = None) -> bool:
        return True

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


AnyEngine = Engine | RankedEngine


def agreed(wanted: dict[int, TrunkKey], ready: ReadyPrograms) -> list[tuple[TrunkKey, list[int]]]:
    """The trunks to run in turn, and whose steps each has, from the trunk that each rank's step needs."""
    if not wanted:
        return []
    key = ready.covering([*wanted.values()])
    if key is not None:
        return [(key, [*wanted])]
    halves = [{i: key for i, key in wanted.items() if bool(key.tiles) == tiles} for tiles in (False, True)]
    if not all(halves):  # no trunk covers several of one kind, such as with few of them ready
        first, *others = wanted
        halves = [{first: wanted[first]}, {i: wanted[i] for i in others}]
    return [trunk for half in halves for trunk in agreed(half, ready)]


def ranks_of(engine: AnyEngine) -> List[Engine]:
    """The engine's ranks: itself, if it is one."""
    return engine.ranks if isinstance(engine, RankedEngine) else [engine]
