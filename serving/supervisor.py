"""Keeps a model answering: when its engine process dies, another is started, which loads the saved programs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from jengine import AsyncLLM, EngineDead, Load, SamplingParams, StepTotals, Tokenizer
from jengine.serving.engine_process import EngineProcess
from jengine.serving.model_provider import RESTART_SECONDS, ModelInfo

logger = logging.getLogger(__name__)
OnEnd = Callable[[EngineDead | None], None]
SHORTEST_RETRY, LONGEST_OVERDUE = 1.0, 30.0  # seconds
COUNTERS = (  # of a Load: since its engine's start
    "preemptions", "compiles_since_start", "prefix_queries", "prefix_hits", "evictions",
    "targets_met", "targets_missed", "targets_rejected",
    "host_queries", "host_hits", "host_declined", "host_spilled", "host_fetched", "host_evictions",
)  # fmt: skip


class BackOff:
    """How long to wait before each start, in seconds: twice as long each time, from `first` to `longest`; from the beginning again
    after an engine that has lived for `healthy`."""

    def __init__(self, first: float = 0.5, longest: float = 60.0, healthy: float = 60.0) -> None:
        self.first, self.longest, self.healthy = first, longest, healthy
        self._next = first

    def next(self, lived: float) -> float:
        """What `after` would return."""
        return self.first if lived >= self.healthy else self._next

    def after(self, lived: float) -> float:
        """The wait after an engine that has lived for this many seconds; 0 is one that did not start."""
        seconds = self.next(lived)
        self._next = min(2 * seconds, self.longest)
        return seconds


class Supervisor:
    """A server's ModelProvider: an AsyncLLM over a live engine process. Belongs to one event loop.

    Args:
        name: of the model, as clients see it.
        make: a new EngineProcess, not started, that calls this when it ends. For example
            `lambda on_end: EngineProcess.of(config, on_end)`.
        on_state: called in the event loop with whether the model answers, when that changes.

    Attributes:
        restarts: engines started after the first.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[OnEnd], EngineProcess],
        *,
        on_state: Callable[[bool], None] = lambda serving: None,
        back_off: BackOff | None = None,
    ) -> None:
        self.restarts = 0
        self._name, self._make, self._on_state = name, make, on_state
        self._back_off = back_off or BackOff()
        self._tokenizer: Tokenizer | None = None
        self._facts: ModelInfo | None = None
        self._llm: AsyncLLM | None = None
        self._past: Load | None = None  # the last engine's, with what those before it had counted
        self._past_totals = StepTotals()  # likewise
        self._serving = self._retired = False
        self._since = time.monotonic()  # when the engine that answers was ready
        self._expected: float | None = None  # when the next one should be, where none answers
        self._start_seconds = RESTART_SECONDS  # of late
        self._keeper: asyncio.Task[None] | None = None

    @property
    def llm(self) -> AsyncLLM:
        """The one that answers now.

        Raises:
            EngineDead: there is none.
        """
        if self._llm is None:
            raise EngineDead("there is no engine at this moment")
        return self._llm

    @property
    def load(self) -> Load:
        """Of the engine that answers now, but with what all engines have counted: these numbers never fall. May be read in any thread.

        Raises:
            EngineDead: there is none.
        """
        past = self._past  # before the engine: else one that ends meanwhile would be counted twice
        load = self.llm.load
        return load if past is None else _added(past, load)

    @property
    def totals(self) -> StepTotals:
        """Of all engines' steps, but for memory. Raises as `load`."""
        return self._past_totals + self.llm.backend.totals

    @property
    def info(self) -> ModelInfo:
        """Of the model, since the first engine is ready.

        Raises:
            EngineDead: it is not yet.
        """
        if self._facts is None:
            raise EngineDead("the first engine is still starting")
        return self._facts

    @property
    def serving(self) -> bool:
        """Whether clients should come: not before the start, while a new engine starts, or from `retire` or `close` on."""
        return self._serving

    @property
    def retry_seconds(self) -> float:
        """Until the next engine should be ready: what is left of the back-off, and a start. The longer it is overdue, the longer."""
        now = time.monotonic()
        if self._expected is None:  # the engine has just died, or the server is closing
            return self._back_off.next(now - self._since) + self._start_seconds
        left = self._expected - now
        return max(left, min(-left / 2, LONGEST_OVERDUE), SHORTEST_RETRY)

    def retire(self) -> None:
        """From now on the model counts as not serving, though it still answers."""
        self._retired = True
        self._set(False)

    async def start(self) -> None:
        """Start the first engine. Cancelling this ends it.

        Raises:
            InvalidArgument, ModelError, OutOfMemory, EngineDead: as EngineProcess.start. A server can only give up then.
        """
        ended = await self._launch()
        self._keeper = asyncio.create_task(self._keep(ended), name="engine-keeper")

    async def close(self, drain_seconds: float = 0.0) -> None:
        """End: no new requests, up to this many seconds for those that run, then they are aborted; then the engine process ends.
        May be called again, to cut a drain short."""
        self._set(False)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._llm is not None:
            await self._llm.close(drain_seconds)

    # --- engines, one after the other ------------------------------------------------------------

    async def _keep(self, ended: asyncio.Future[EngineDead | None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            since = loop.time()
            error = await ended
            self._set(False)
            dead, last, totals, self._llm = self.llm, self.load, self.totals, None
            self._past, self._past_totals = last, totals
            await dead.close()
            ended = await self._restart(error, loop.time() - since)
            self.restarts += 1

    async def _restart(self, error: BaseException | None, lived: float) -> asyncio.Future[EngineDead | None]:
        while True:
            seconds = self._back_off.after(lived)
            self._expected = time.monotonic() + seconds + self._start_seconds
            logger.error("%s; starting another in %.1f s", error or "the engine was ended by a fault in making text", seconds)
            await asyncio.sleep(seconds)
            try:
                return await self._launch()
            except Exception as wrong:  # a device that is not free yet, a file that is being replaced: perhaps not for ever
                error, lived = wrong, 0.0

    async def _launch(self) -> asyncio.Future[EngineDead | None]:
        """Returns what the engine's end will make known."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[EngineDead | None] = loop.create_future()

        def on_end(error: EngineDead | None) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed
                loop.call_soon_threadsafe(_resolve, ended, error)

        engine, begun = self._make(on_end), time.monotonic()
        self._expected = begun + self._start_seconds
        try:
            self._llm = await asyncio.to_thread(self._start, engine)
        except BaseException:
            await asyncio.to_thread(engine.quit)
            raise
        self._since, self._expected = time.monotonic(), None
        if not engine.info.programs_compiled:  # as the next start will not compile either
            self._start_seconds = self._since - begun
        self._set(True)
        return ended

    def _start(self, engine: EngineProcess) -> AsyncLLM:
        """In a thread: it takes seconds or minutes."""
        engine.start()
        info = engine.info
        if self._tokenizer is None:
            assert info.tokenizer_folder is not None
            self._tokenizer = Tokenizer.load(Path(info.tokenizer_folder))
        self._facts = ModelInfo(
            name=self._name,
            limits=engine.limits,
            dtype=info.dtype,
            quantization=info.quantization,
            devices=info.devices,
            mesh=info.mesh,
            has_chat_template=bool(self._tokenizer.chat_templates),
        )
        return AsyncLLM.over(engine, self._tokenizer, SamplingParams(**info.sampling_defaults), stream_interval=info.stream_interval)

    def _set(self, serving: bool) -> None:
        serving = serving and not self._retired
        if serving != self._serving:
            self._serving = serving
            self._on_state(serving)


def _added(past: Load, load: Load) -> Load:
    """A load whose counters begin where those of `past` ended."""
    pages = dict(zip(past.cache_groups, past.hit_pages, strict=True))
    hit_pages = tuple(count + pages.get(group, 0) for group, count in zip(load.cache_groups, load.hit_pages, strict=True))
    decisions = tuple((Counter(dict(past.decisions)) + Counter(dict(load.decisions))).items())
    return load._replace(hit_pages=hit_pages, decisions=decisions, **{name: getattr(past, name) + getattr(load, name) for name in COUNTERS})


def _resolve(future: asyncio.Future[EngineDead | None], error: EngineDead | None) -> None:
    if not future.cancelled():  # nobody asks any more
        future.set_result(error)
