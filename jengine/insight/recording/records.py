"""Records of steps and requests, and totals over all steps for metrics. Plain data, without jax, that can be
saved and sent to other processes.

Times are seconds of time.perf_counter(), which on supported systems is the clock of time.monotonic(). 0 means
"not yet".
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from jengine.scheduling.step_plan import Work
from jengine.table.program_table import SamplerKey, TrunkKey

# stages of the loop, in the order of a step
STAGES = ("schedule", "pack", "dispatch", "mask", "wait", "collect", "text", "away")
RESUMPTIONS = ("cached", "swap", "recompute")  # kinds of preemption, by how the sequence resumed


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """One step. Steps overlap: while the device runs one, the host schedules the next and collects the
    previous one.

    Attributes:
        number: in order of dispatch, from 0.
        trunk, sampler: the programs that ran.
        rows: number of decode rows, drafts' among them, in each of its `steps` steps or in the first of them.
        tiles, prompt_tokens: of prompts, without tokens that lie on rows.
        work: the part of its cost that does not depend on its programs.
        chunks: of prompts: (sequence, position of the first token, tokens).
        begun: time at which the loop began with this step.
        schedule: seconds to plan it.
        pack: seconds from then until the call of its trunk: slot updates, page copies, the packed batch.
        dispatch: seconds to call its programs.
        mask: seconds to compute its token masks; 0 if no request had one.
        dispatched: time at which its sampler had been called.
        wait: seconds for which the host waited for its tokens.
        waited: whether the host had to wait.
        ended: time at which its tokens were read.
        collect: seconds to give the tokens to its sequences.
        text: seconds to pass them on (text, delivery). In a server's engine process: to send them to the
            server.
        away: seconds from then until the loop began with the next step, while there was work. In the library,
            callers had the thread; in an engine process, it received requests from its server.
        device: seconds on the device; 0 if unknown.
        predicted: the same, predicted when the step was planned.
        predicted_plan: predicted sum of schedule, pack and dispatch.
        predicted_collect: predicted sum of collect, text and away.
        cpu: CPU seconds of the loop's thread while it planned the step.
        drift: duration of steps relative to their usual duration.
        running, waiting: numbers of requests when it was planned.
        free, cached, owned: numbers of pages.
        preemptions, queries, hits, evictions: totals since the engine's start: preempted sequences; prompt
            tokens looked up in the prefix cache, and found; cached pages reused for other tokens.
        resumptions: preempted sequences that resumed since the start: with their pages still on the device,
            fetched from the host, or recomputed.
        spills, fetches: pages copied to host memory and back since the start; see EngineConfig.swap_space.
        compiles, compile_seconds: unannounced XLA compilations of this process.
        pause_seconds: total pauses of Python's garbage collector in this process.
        strategy: the strategy in use.
        reason: why it has this number of tiles; empty if there was nothing to decide.
        steps: number of decode steps in a burst; otherwise 1.
        prompt_rows: how many of its rows hold tokens of prompts.
        drafts: how many of its rows verify drafts.
        accepted: how many of these drafts became output.
        patches: of the encoder's programs that ran since the step before, padding included; 0: none did.
        encoder: seconds of these, predicted.
    """

    number: int
    trunk: TrunkKey
    sampler: SamplerKey
    rows: int
    tiles: int
    prompt_tokens: int
    work: Work
    chunks: tuple[tuple[int, int, int], ...]
    begun: float
    schedule: float
    pack: float
    dispatch: float
    mask: float
    dispatched: float
    predicted: float
    predicted_plan: float
    predicted_collect: float
    drift: float
    running: int
    waiting: int
    free: int
    cached: int
    owned: int
    preemptions: int
    queries: int
    hits: int
    evictions: int
    resumptions: tuple[int, int, int]
    spills: int
    fetches: int
    compiles: int
    compile_seconds: float
    pause_seconds: float
    strategy: str
    reason: str
    steps: int = 1
    cpu: float = 0.0
    wait: float = 0.0
    waited: bool = False
    ended: float = 0.0
    collect: float = 0.0
    text: float = 0.0
    away: float = 0.0
    device: float = 0.0
    prompt_rows: int = 0
    drafts: int = 0
    accepted: int = 0
    patches: int = 0
    encoder: float = 0.0

    @property
    def generated(self) -> int:
        """Number of tokens that its decode rows gave."""
        return (self.rows - self.prompt_rows - self.drafts) * self.steps + self.accepted

    @property
    def padded_rows(self) -> int:
        return self.trunk.rows - self.rows

    def padded_tokens(self, tile_size: int) -> int:
        """Padding tokens in its tiles."""
        return self.trunk.tiles * tile_size - self.prompt_tokens

    @property
    def planned(self) -> float:
        """Host seconds until it was dispatched."""
        return self.schedule + self.pack + self.dispatch

    @property
    def seconds(self) -> float:
        """The loop's seconds for this step, over all stages."""
        return self.planned + self.mask + self.wait + self.collect + self.text + self.away

    @property
    def name(self) -> str:
        return f"{self.trunk} {self.sampler}" + (f" x{self.steps}" if self.steps > 1 else "")


class RequestRecord(msgspec.Struct, array_like=True, gc=False):
    """A request that has ended, runs or waits.

    Attributes:
        number: number of its sequence, as in chunks.
        arrival, queued: times at which it reached the server, or the library, and at which the engine queued
            it.
        scheduled: time at which it first ran; 0 means "not yet", here and below.
        cached: prompt tokens that it did not compute.
        reason: finish reason; empty while it is unfinished.
        pages: number of pages that it holds, including shared ones; 0 once it has ended.
        lora: the adapter that it uses; empty: none.
    """

    request_id: str
    number: int
    client: str
    arrival: float
    scheduled: float
    first_token: float
    ended: float
    prompt_tokens: int
    cached: int
    output_tokens: int
    preemptions: int
    reason: str
    pages: int = 0
    lora: str = ""
    queued: float = 0.0


class Pause(msgspec.Struct, array_like=True, gc=False):
    """A garbage collection that took long enough to be recorded.

    Attributes:
        collected: number of freed objects.
        thread: name of the thread that it ran in.
    """

    begun: float
    seconds: float
    generation: int
    collected: int
    thread: str = ""


class Memory(msgspec.Struct, array_like=True, gc=False):
    """A sample of memory in bytes: resident in this process, and available on the machine (0: unknown)."""

    at: float
    resident: int
    available: int


class Machine(msgspec.Struct, array_like=True, gc=False):
    """A sample of the kernel's figures about processors, and of the engine's programs. Figures are seconds of
    all processors together that grow from some time on; -1: unknown, as on systems without Linux's /proc.

    Attributes:
        processors: number that the machine has.
        ran, queued: of this process's threads of usual priority: with a processor, and able to run but
            without one.
        loop_ran, loop_queued: of the thread that steps the engine.
        normal, low: of the machine's processes, this one included, with usual and with low priority. Threads
            and processes that compile while steps run have low priority.
        stolen: taken by the hypervisor.
        throttled: seconds for which the container's quota was used up.
        pressure: seconds for which some process of the machine waited for a processor.
        switches: number of involuntary context switches of this process.
        programs_ready, programs: see Load.
    """

    at: float
    processors: int
    ran: float
    queued: float
    loop_ran: float
    loop_queued: float
    normal: float
    low: float
    stolen: float
    throttled: float
    pressure: float
    switches: int
    programs_ready: int
    programs: int


class EngineFacts(msgspec.Struct, array_like=True):
    """Options that explanations use; see EngineConfig.

    Attributes:
        pages: number of pages in the cache, without the null page.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    pages: int
    overlap: bool = True
    prefix_caching: bool = True


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

    def __add__(self, other: StepTotals) -> StepTotals:
        """The sum of both. Memory is taken from the second."""

        def added(name: str) -> Any:
            mine, its = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                return {key: mine.get(key, 0) + its.get(key, 0) for key in mine | its}
            if isinstance(mine, tuple):
                return tuple(a + b for a, b in zip(mine, its, strict=True))
            return mine + its

        sums: dict[str, Any] = {name: added(name) for name in self.__struct_fields__}
        return StepTotals(**{**sums, "resident": other.resident})
