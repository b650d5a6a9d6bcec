"""What the engine's loop notes of each step and each request. Plain data, free of jax: it is saved, and crosses processes.

Times are seconds of time.perf_counter(), which on the systems that are supported is the clock of time.monotonic(); 0 is "not yet".
"""

from __future__ import annotations

import msgspec

from jengine.scheduling.work import Work
from jengine.table.program_table import SamplerKey, TrunkKey

STAGES = ("schedule", "pack", "dispatch", "mask", "wait", "collect", "text", "away")  # of the loop, in the order of a step
RESUMPTIONS = ("cached", "swap", "recompute")  # kinds of preemption, by how the sequence came back
HOST = tuple(stage for stage in STAGES if stage != "wait")


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """One step. Steps overlap: while the device runs one, the host schedules the next and collects the one before.

    Attributes:
        number: in the order of dispatch, from 0.
        trunk, sampler: the programs that ran.
        rows: sequences that decoded in it, in each of its `steps` steps or in the first of them.
        tiles, prompt_tokens: of prompts.
        work: what its seconds depend on beside its programs.
        chunks: of prompts: (sequence, position of the first token, tokens).
        begun: when the loop turned to it.
        schedule: seconds until it was planned.
        pack: until its trunk was called: slot updates, page copies, the packed batch.
        dispatch: that the calls of its programs took.
        mask: that its token masks took; 0 where no request had one.
        dispatched: when its sampler had been called.
        wait: seconds until its tokens were there, from when the host asked for them.
        waited: whether they were not there yet then.
        ended: when they were read.
        collect: seconds until its sequences had them.
        text: until they were passed on: text, delivery. In a server's engine process: until the server was sent them.
        away: from there until the loop turned to the next step, though there was work: callers of the library had the thread; an engine's
            process took requests from its server.
        device: seconds that it took on the device; 0 where that is not known.
        predicted: the same, as predicted when it was planned.
        predicted_plan: schedule, pack and dispatch, as predicted.
        predicted_collect: collect, text and away, as predicted.
        cpu: processor seconds that the loop's thread got while it was planned.
        drift: how much longer steps took than usual, as a factor.
        running, waiting: requests, when it was planned.
        free, cached, owned: pages.
        preemptions, queries, hits, evictions: since the engine's start: sequences preempted; prompt tokens looked up in the prefix cache,
            and found; cached pages that were given to others.
        resumptions: since the start, preempted sequences that ran again: with their pages still on the device, fetched from the host,
            or computed again.
        spills, fetches: since the start, pages copied to the host's memory and back, see EngineConfig.swap_space.
        compiles, compile_seconds: XLA compilations of this process that were not announced.
        pause_seconds: that Python's garbage collector took in this process.
        strategy: in use.
        reason: why it has so many tiles; empty where there was nothing to decide.
        steps: decode steps in a row, of a burst; else 1.
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

    @property
    def padded_rows(self) -> int:
        return self.trunk.rows - self.rows

    def padded_tokens(self, tile_size: int) -> int:
        """Of its tiles."""
        return self.trunk.tiles * tile_size - self.prompt_tokens

    @property
    def planned(self) -> float:
        """Host seconds until it was dispatched."""
        return self.schedule + self.pack + self.dispatch

    @property
    def seconds(self) -> float:
        """Of the loop, for this step: all stages."""
        return self.planned + self.mask + self.wait + self.collect + self.text + self.away

    @property
    def name(self) -> str:
        return f"{self.trunk} {self.sampler}" + (f" x{self.steps}" if self.steps > 1 else "")


class RequestRecord(msgspec.Struct, array_like=True, gc=False):
    """A request that has ended, or one that runs or waits.

    Attributes:
        number: of its sequence, which chunks name.
        scheduled: when it first ran; 0: not yet, and so for the others.
        cached: tokens of its prompt that it did not compute.
        reason: why it has ended; empty: it has not.
        pages: that it holds, those that it shares included; 0 once it has ended.
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


class Pause(msgspec.Struct, array_like=True, gc=False):
    """A collection of Python's garbage collector that took long enough to be noted.

    Attributes:
        collected: objects that were garbage.
    """

    begun: float
    seconds: float
    generation: int
    collected: int


class Memory(msgspec.Struct, array_like=True, gc=False):
    """Bytes, now and then: resident of this process, and available on the machine (0: not known)."""

    at: float
    resident: int
    available: int


class EngineFacts(msgspec.Struct, array_like=True):
    """Options that explanations name; see EngineConfig.

    Attributes:
        pages: of the cache, the null page not counted.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    pages: int
    overlap: bool = True
    prefix_caching: bool = True
