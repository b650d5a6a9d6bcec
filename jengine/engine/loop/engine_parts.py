"""The parts that an engine is built from, and programs that become ready while it runs. On a GPU, a program's
first runs take much longer, so these are with padding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from jengine.core.pooling import Embedder, Reranker
from jengine.engine.loop.live_weights import FixedWeights
from jengine.engine.loop.lora_store import LoraStore
from jengine.engine.page_events import PageEventPublisher
from jengine.engine.page_transfer import PageTransfer
from jengine.execution.background import BackgroundPrograms
from jengine.execution.kinds import KINDS, DeviceCall, Key
from jengine.execution.runner import Runner
from jengine.insight.recording.recorder import TraceRecorder
from jengine.scheduling.step_plan import StepPlan
from jengine.table.ready_programs import ReadyPrograms


@dataclass(slots=True, kw_only=True)
class EngineParts:
    """What an engine may have beside its model, runner and scheduler.

    Attributes:
        overlap: whether to dispatch a step before the previous one's tokens are read.
        seed: seeds the random seeds of requests that set none.
        num_programs: number of programs in the table, of all kinds.
        programs: programs that become ready later; None: all are ready.
        save_costs: called once, when the engine is closed or garbage-collected.
        recorder: records each finished request.
        embedder: how the model embeds; None: the table has no programs for embeddings.
        reranker: how the model scores pairs of texts; None: its folder does not say.
        weights: the weights, which may be replaced.
        loras: loaded LoRA adapters; None: the table has no programs for them.
        page_events: publishes what the prefix cache holds.
        pages: gives pages to a store, and loads them from there.
    """

    overlap: bool = True
    seed: int = 0
    num_programs: int = 0
    programs: BackgroundPrograms | FirstUse | None = None
    save_costs: Callable[[], None] | None = None
    recorder: TraceRecorder | None = None
    embedder: Embedder | None = None
    reranker: Reranker | None = None
    weights: FixedWeights = field(default_factory=FixedWeights)
    loras: LoraStore | None = None
    page_events: PageEventPublisher | None = None
    pages: PageTransfer | None = None


def programs_ready(later: BackgroundPrograms | FirstUse | None, number: int) -> tuple[int, int]:
    """Number of programs that are ready, and of all. Thread-safe."""
    return number if later is None else later.ready, number


RUNS = 2  # the first loads a program's kernels, the second makes its CUDA graph
SHARE = 10.0  # while requests run, at most the inverse of this share of the time goes to first uses


class FirstUse:
    """Programs that arrive while the engine serves, and become ready when they have run twice. Only the
    loop's thread may run them, since they write the cache.

    Args:
        programs: that arrive.
        used: keys of the programs that have run before.
    """

    def __init__(self, programs: BackgroundPrograms, runner: Runner, used: Iterable[Key]) -> None:
        self._programs, self._runner = programs, runner
        # until all have arrived, run or not
        self.wait, self.prefer, self.stop = programs.wait, programs.prefer, programs.stop
        self._used = dict.fromkeys(used)  # an ordered set
        self._seen = 0  # number of programs that had arrived when examples were made
        self._examples: dict[Key, StepPlan | DeviceCall] = {}  # of programs that have not run
        self._not_before = 0.0  # while requests run

    @property
    def ready(self) -> int:
        """Number of programs that steps may use. It only grows."""
        return len(self._used)

    def usable(self) -> list[Key]:
        return [*self._used]

    @property
    def left(self) -> bool:
        """Whether a program waits for its first use."""
        if self._seen < self._programs.ready:
            keys = self._programs.usable()
            self._seen = len(keys)
            spec = self._runner.spec
            ready = ReadyPrograms(spec.table, [key for key in keys if not isinstance(key, str)])
            every: dict[Any, StepPlan | DeviceCall] = {}
            for kind in KINDS:
                every.update(kind.examples(spec, ready))
            self._examples = {key: every[key] for key in keys if key in every and key not in self._used}
        return bool(self._examples)

    def run_next(self, *, busy: bool, in_flight: bool) -> None:
        """Runs the program that has waited longest, if there is one; while requests or steps run, only now
        and then. in_flight: whether steps are. In a pipeline, they count the steps before them.
        """
        begun = time.perf_counter()
        if not self.left or ((busy or in_flight) and begun < self._not_before):
            return
        if in_flight and len(self._runner.spec.stages) > 1:
            return
        first = next(iter(self._examples))
        ran = self._runner.run_example(first, self._examples[first], times=RUNS)
        for done in ran:
            self._examples.pop(done, None)
            self._used[done] = None
        ended = time.perf_counter()
        self._not_before = ended + SHARE * (ended - begun)
