"""An iteration of an engine's loop whose step the caller dispatches: alone, or with those of other ranks; and
the gate at which requests wait while weights change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from typing import Literal, NamedTuple

from jengine.base.errors import InvalidArgument
from jengine.core.request import Request
from jengine.core.updates import Update
from jengine.core.weights import PauseMode, Tag
from jengine.engine.loop.engine_parts import FirstUse
from jengine.engine.page_transfer import PageTransfer
from jengine.execution.background import BackgroundPrograms
from jengine.execution.runner import InFlight, PendingSample, Runner
from jengine.insight.recording.step_recorder import StepRecorder
from jengine.scheduling.requests.loras import Lora, LoraPlaces
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import VARIANTS
from jengine.table.ready_programs import Demand, ReadyPrograms, by_demand

# what was dispatched of a turn's step; None: nothing is left but to read the oldest step in flight, which is
# another rank's if "passed"
Begun = InFlight | PendingSample | Literal["passed"] | None
BATCH_POLL_SECONDS = 0.005


class Wanted(NamedTuple):
    """A step to dispatch; only its trunk if it is masked, since masks depend on tokens that are not read."""

    plan: StepPlan
    masked: bool


# yields once, the step or None, takes what was dispatched, and returns the previous step's updates
Turn = Generator[Wanted | None, Begun, list[Update]]


def ended(turn: Turn, begun: Begun) -> list[Update]:
    """The updates of a turn whose step was dispatched."""
    try:
        turn.send(begun)
    except StopIteration as end:
        updates: list[Update] = end.value
        return updates
    raise AssertionError("a turn has one step")


def next_step(
    scheduler: Scheduler, runner: Runner, records: StepRecorder, pages: PageTransfer | None
) -> tuple[StepPlan | None, bool]:
    """The next step, and whether pages move or images are encoded before it."""
    if pages is not None:
        pages.settle()
    if scheduler.blocks.tier is not None:
        scheduler.swapped(*runner.swapped())
    plan, swaps = scheduler.schedule(), scheduler.take_swaps()
    if swaps is not None:
        runner.swap(swaps)
    encoding = scheduler.registry.images.take_encoding()
    if encoding is not None:
        runner.encode(encoding)
        records.encodes(encoding.key)
    return plan, swaps is not None or encoding is not None


def take_programs(scheduler: Scheduler, programs: BackgroundPrograms | FirstUse, taken: int) -> int:
    """Gives newly ready programs to the scheduler, and asks for those that its requests need most. Returns
    the number of those that it has. taken: number of those that it had.
    """
    if (ready := programs.ready) == taken:
        return taken
    table = scheduler.table
    keys = [key for key in programs.usable() if not isinstance(key, str)]
    scheduler.predictor.ready = ReadyPrograms(table, keys)
    if missing := {*table.all_keys()}.difference(keys):
        programs.prefer(by_demand(table, missing, _demand(scheduler)))
    return ready


def _demand(scheduler: Scheduler) -> Demand:
    """The demand of the running sequences, and of those that could run beside them."""
    running, waiting = scheduler.registry.snapshot()
    soon = [*running, *waiting[: max(scheduler.registry.max_num_seqs - len(running), 0)]]
    tokens = sum(max(sequence.prompt_len - sequence.num_computed, 0) for sequence in soon)
    ranks = {sequence.variant_rank for sequence in soon} or {len(VARIANTS) - 1}
    variants = tuple(VARIANTS[rank] for rank in sorted(ranks))
    return Demand(len(soon), -(-tokens // scheduler.table.tile_size), variants)


def wait_for_work(scheduler: Scheduler, runner: Runner, pages: PageTransfer | None) -> None:
    """Waits a moment for what a step needs: pages, or the rest of a batch. New requests end the wait soon."""
    if scheduler.registry.fetching:
        runner.wait_for_staged()
        return
    wait = scheduler.wakes_at - scheduler.clock()
    if pages is not None and pages.waits:
        pages.wait()
    elif 0.0 < wait < math.inf:
        time.sleep(min(wait, BATCH_POLL_SECONDS))


class PromptAtGate(NamedTuple):
    """A prompt's requests that wait, and their adapter, which they keep even if it is unloaded."""

    requests: list[Request]
    lora: Lora | None


class Gate:
    """
    Args:
        loras: loaded ones, to note those that requests wait with.

    Attributes:
        mode: how the engine was paused; None: it is not.
        asleep: what sleep has freed.
        by_sleep: whether sleep has paused it, so that it goes on as soon as it can.
    """

    def __init__(self, loras: LoraPlaces) -> None:
        self._loras = loras
        self.mode: PauseMode | None = None
        self.asleep: set[Tag] = set()
        self.by_sleep = False
        self._held: dict[str, PromptAtGate] = {}  # by id; a prompt's requests are held together

    @property
    def plans(self) -> bool:
        """Whether steps are planned: always, or for requests that came before the pause; not asleep."""
        return self.mode in (None, "wait") and not self.asleep

    @property
    def held(self) -> int:
        """Number of requests that wait here."""
        return len(self._held)

    def hold(self, requests: tuple[Request, ...], lora: Lora | None) -> None:
        """Keeps a prompt's requests until the engine resumes.

        Raises:
            InvalidArgument: an id is in use.
        """
        for request in requests:
            if request.request_id in self._held:
                limit = "a request with this id is not finished yet"
                raise InvalidArgument("request_id", request.request_id, limit)
        together = PromptAtGate([*requests], lora)
        for request in requests:
            self._held[request.request_id] = together
            self._loras.came(lora)

    def drop(self, request_id: str) -> bool:
        """Forgets a request. Returns False if it does not wait here."""
        together = self._held.pop(request_id, None)
        if together is None:
            return False
        together.requests[:] = [each for each in together.requests if each.request_id != request_id]
        self._loras.ended(together.lora)
        return True

    def open(
        self,
        queue: Callable[[list[Request], Lora | None], object],
        fail: Callable[[list[Request], Exception], None],
    ) -> None:
        """Ends the pause, and queues each prompt's requests. `fail` gets those that cannot be queued."""
        self.mode, self.by_sleep = None, False
        held, self._held = self._held, {}
        for together in {id(prompt): prompt for prompt in held.values()}.values():
            try:
                queue(*together)
            except Exception as error:
                fail(together.requests, error)
            for _ in together.requests:
                self._loras.ended(together.lora)
