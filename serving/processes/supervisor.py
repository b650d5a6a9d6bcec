"""Keeps a model available: when its engine process dies, another is started, which loads the saved
programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jengine import AsyncLLM, EngineDead, ImageReader, Load, SamplingParams, StepTotals, Tokenizer
from jengine.serving.calls.adapters import Adapters
from jengine.serving.calls.model_provider import RESTART_SECONDS, ModelInfo, NotReady
from jengine.serving.processes.engine_process import EngineProcess
from jengine.serving.processes.starting import StartProgress

logger = logging.getLogger(__name__)
OnEnd = Callable[[EngineDead | None], None]
NOT_LOADED = "the model is not loaded; a request that names it loads it"
SHORTEST_RETRY, LONGEST_OVERDUE = 1.0, 30.0  # seconds
COUNTERS = (  # counters of a Load, since its engine's start
    "preemptions", "compiles_since_start", "report_faults", "prefix_queries", "prefix_hits", "evictions",
    "targets_met", "targets_missed", "targets_rejected",
    "host_queries", "host_hits", "host_declined", "host_spilled", "host_fetched", "host_evictions",
)  # fmt: skip


class BackOff:
    """Delays before restarts, in seconds: doubled each time, from `first` to `longest`, and reset after an
    engine that lived for `healthy` seconds."""

    def __init__(self, first: float = 0.5, longest: float = 60.0, healthy: float = 60.0) -> None:
        self.first, self.longest, self.healthy = first, longest, healthy
        self._next = first

    def next(self, lived: float) -> float:
        """The result that `after` would have."""
        return self.first if lived >= self.healthy else self._next

    def after(self, lived: float) -> float:
        """The delay after an engine that lived for this many seconds; 0: it did not start."""
        seconds = self.next(lived)
        self._next = min(2 * seconds, self.longest)
        return seconds


class Supervisor:
    """A server's ModelProvider: an AsyncLLM over a running engine process. Belongs to one event loop.

    Args:
        name: the model's name for clients.
        make: creates an EngineProcess that is not started, and calls its argument when it ends. For example
            `lambda on_end: EngineProcess.of(config, on_end)`.
        on_state: called in the event loop with whether the model answers, when that changes.
        adapters: loaded into each engine before it serves.
        on_demand: whether it starts only when a request names the model.

    Attributes:
        restarts: number of engines started after the first.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[OnEnd], EngineProcess],
        *,
        on_state: Callable[[bool], None] = lambda serving: None,
        back_off: BackOff | None = None,
        adapters: Adapters | None = None,
        on_demand: bool = False,
    ) -> None:
        self.restarts = 0
        self.adapters = Adapters() if adapters is None else adapters
        self._name, self._make, self._on_state, self._unasked = name, make, on_state, on_demand
        self._back_off = back_off or BackOff()
        self._tokenizer: Tokenizer | None = None
        self._facts: ModelInfo | None = None
        self._llm: AsyncLLM | None = None
        self._starting: EngineProcess | None = None
        self._running: EngineProcess | None = None
        self._past_generated = 0  # tokens of earlier engines
        self._past: Load | None = None  # the last engine's load, with the counters of earlier ones added
        self._past_totals = StepTotals()  # likewise
        self._serving = self._retired = False
        self._since = time.monotonic()  # time at which the current engine was ready
        # time at which the next engine should be ready, if none is running
        self._expected: float | None = None
        self._start_seconds = RESTART_SECONDS  # recent duration of a start
        self._keeper: asyncio.Task[None] | None = None

    @property
    def llm(self) -> AsyncLLM:
        """The current AsyncLLM.

        Raises:
            NotReady: no engine is running.
        """
        if self._llm is None:
            raise NotReady(self.why_not_ready)
        return self._llm

    @property
    def load(self) -> Load:
        """The current engine's load, with the counters of all engines, so that they never decrease.
        Thread-safe.

        Raises:
            NotReady: no engine is running.
        """
        past = self._past  # read before the engine, since one that ends meanwhile would be counted twice
        load = self.llm.load
        return load if past is None else _added(past, load)

    @property
    def totals(self) -> StepTotals:
        """Totals of all engines' steps, except memory. Raises as `load`."""
        return self._past_totals + self.llm.backend.totals

    @property
    def info(self) -> ModelInfo:
        """Facts about the model, once the first engine is ready.

        Raises:
            NotReady: the first engine is not ready.
        """
        if self._facts is None:
            raise NotReady(self.why_not_ready)
        return self._facts

    @property
    def facts(self) -> ModelInfo | None:
        """The same; None until the first engine is ready."""
        return self._facts

    @property
    def generated(self) -> int:
        """Number of tokens generated by all engines."""
        return self._past_generated + (0 if self._running is None else self._running.generated)

    @property
    def why_not_ready(self) -> str:
        """Why no engine is running, such as "starting: compiling, 12 of 41 programs, about 20 s left"."""
        if self._facts is not None and self._keeper is not None:
            return "the engine has ended and is being restarted"
        if self._starting is None and (self._facts is not None or self._unasked):
            return NOT_LOADED
        return f"starting: {self._progress or StartProgress()}"

    @property
    def _progress(self) -> StartProgress | None:
        """Of the engine that starts, if any."""
        return None if self._starting is None else self._starting.progress

    @property
    def serving(self) -> bool:
        """Whether clients should send requests: not before the start, during a restart, or after `retire` or
        `close`.
        """
        return self._serving

    @property
    def retry_seconds(self) -> float:
        """Seconds until the next engine should be ready: as its progress shows, or the rest of the delay, and
        a start. Grows if the engine is overdue.
        """
        if self._progress is not None and (left := self._progress.seconds_left) is not None:
            return min(max(left, SHORTEST_RETRY), LONGEST_OVERDUE)
        now = time.monotonic()
        if self._expected is None:  # the engine has just died, or the server is closing
            return self._back_off.next(now - self._since) + self._start_seconds
        left = self._expected - now
        return max(left, min(-left / 2, LONGEST_OVERDUE), SHORTEST_RETRY)

    def retire(self) -> None:
        """From now on the model counts as not serving, but still answers."""
        self._retired = True
        self._set(False)

    async def start(self) -> None:
        """Starts the first engine. Cancelling this ends the engine.

        Raises:
            InvalidArgument, ModelError, OutOfMemory, EngineDead: as EngineProcess.start, or an adapter cannot
                be loaded; the server cannot run.
        """
        ended = await self._launch()
        self._keeper = asyncio.create_task(self._keep_running(ended), name="engine-keeper")

    async def unload(self) -> None:
        """Ends the engine, until `start` starts another. Its requests must have ended."""
        keeper, self._keeper = self._keeper, None  # not loaded from now on
        self._set(False)
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])
        if self._llm is not None:
            await self._forget()

    @property
    def loaded(self) -> bool:
        """Whether an engine runs or is being replaced, after `start` and before `unload`."""
        return self._keeper is not None

    @property
    def engine(self) -> EngineProcess:
        """The current engine. Raises NotReady if none is running."""
        if self._running is None:
            raise NotReady(self.why_not_ready)
        return self._running

    @property
    def pid(self) -> int | None:
        """The process of the current engine."""
        return None if self._running is None else self._running.pid

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Stops: rejects new requests, gives running ones `drain_seconds` to finish, aborts the rest, then
        ends the engine process.

        May be called again, to shorten a drain.
        """
        self._set(False)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._llm is not None:
            await self._llm.close(drain_seconds)

    # --- engines -------------------------------------------------------------------------------

    async def _keep_running(self, ended: asyncio.Future[EngineDead | None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            since = loop.time()
            error = await ended
            self._set(False)
            await self._forget()
            ended = await self._restart(error, loop.time() - since)
            logger.info("%s: the model answers again", self._name)
            self.restarts += 1

    async def _forget(self) -> None:
        """Keeps the counters of an engine that has ended, or ends it."""
        dead, last, totals, self._llm = self.llm, self.load, self.totals, None
        self._past, self._past_totals, self._past_generated = last, totals, self.generated
        self._running = None
        await dead.close()

    async def _restart(self, error: BaseException | None, lived: float) -> asyncio.Future[EngineDead | None]:
        while True:
            seconds = self._back_off.after(lived)
            self._expected = time.monotonic() + seconds + self._start_seconds
            logger.error(
                "%s; starting another in %.1f s",
                error or "the engine was stopped after an error in producing text",
                seconds,
            )
            await asyncio.sleep(seconds)
            try:
                return await self._launch()
            except Exception as wrong:
                # perhaps temporary: a device is not free yet, a file is being replaced
                error, lived = wrong, 0.0

    async def _launch(self) -> asyncio.Future[EngineDead | None]:
        """Launches an engine. Returns a future for its end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[EngineDead | None] = loop.create_future()

        def on_end(error: EngineDead | None) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed
                loop.call_soon_threadsafe(_resolve, ended, error)

        engine, begun = self._make(on_end), time.monotonic()
        self._expected, self._starting = begun + self._start_seconds, engine
        try:
            llm, facts = await asyncio.to_thread(self._start, engine)
            await self._load_adapters(llm)
        except BaseException:
            await asyncio.to_thread(engine.quit)
            raise
        finally:
            self._starting = None
        self._running, self._llm, self._facts = engine, llm, facts
        self._since, self._expected = time.monotonic(), None
        if not engine.info.programs_compiled:  # the next start will not compile either
            self._start_seconds = self._since - begun
        self._set(True)
        return ended

    async def _load_adapters(self, llm: AsyncLLM) -> None:
        try:
            await (self.adapters.open(llm, self._name) if self._facts is None else self.adapters.reopen(llm))
        except BaseException:
            await llm.close()
            raise

    def _start(self, engine: EngineProcess) -> tuple[AsyncLLM, ModelInfo]:
        """Runs in a thread, since it takes seconds or minutes."""
        engine.start()
        info = engine.info
        if self._tokenizer is None:
            assert info.tokenizer_folder is not None
            self._tokenizer = Tokenizer.load(Path(info.tokenizer_folder), info.chat_template)
            if info.image_folder is not None:
                encode = partial(self._tokenizer.encode, add_special_tokens=False)
                self._tokenizer.images = ImageReader.of(
                    Path(info.image_folder), encode, info.max_images, info.image_rows
                )
        facts = ModelInfo(
            name=self._name,
            limits=engine.limits,
            dtype=info.dtype,
            quantization=info.quantization,
            devices=info.devices,
            mesh=info.mesh,
            has_chat_template=bool(self._tokenizer.chat_templates),
        )
        defaults = SamplingParams(**info.sampling_defaults)
        return AsyncLLM.over(engine, self._tokenizer, defaults, stream_interval=info.stream_interval), facts

    def _set(self, serving: bool) -> None:
        serving = serving and not self._retired
        if serving != self._serving:
            self._serving = serving
            self._on_state(serving)


def _added(past: Load, load: Load) -> Load:
    """A load whose counters continue from those of `past`."""
    pages = dict(zip(past.cache_groups, past.hit_pages, strict=True))
    hit_pages = tuple(
        count + pages.get(group, 0) for group, count in zip(load.cache_groups, load.hit_pages, strict=True)
    )
    decisions = tuple((Counter(dict(past.decisions)) + Counter(dict(load.decisions))).items())
    return load._replace(
        hit_pages=hit_pages,
        decisions=decisions,
        **{name: getattr(past, name) + getattr(load, name) for name in COUNTERS},
    )


def _resolve(future: asyncio.Future[EngineDead | None], error: EngineDead | None) -> None:
    if not future.cancelled():  # the waiter may have been cancelled
        future.set_result(error)
