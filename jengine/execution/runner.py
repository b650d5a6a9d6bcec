"""Runs steps: dispatches without waiting. Results are read one step later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import batched
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jengine.execution.batch import BatchLayout
from jengine.execution.burst import pack_burst
from jengine.execution.kv_cache import COPIES
from jengine.execution.logits import count_chunks
from jengine.execution.sampler import Sampled, SampledLogprobs
from jengine.execution.slots import UPDATE_WORDS, pack_updates
from jengine.execution.worker import Call, Worker, encode
from jengine.observe.progress import Progress, progress_bar
from jengine.parallel.link import Link, SingleProcess
from jengine.scheduling.step_plan import Span, StepPlan, Swaps, Tokens
from jengine.table.pages import SWAPS
from jengine.table.program_table import PoolKey, SamplerKey, ScoreKey, TrunkKey
from jengine.table.ready_programs import ReadyPrograms


@dataclass(slots=True)
class PendingSample:
    """A step whose trunk is dispatched but not its sampler, since masks may depend on tokens that are not read yet."""

    plan: StepPlan
    scores: SampledLogprobs | None
    pooled: jax.Array | None
    started: float  # time.perf_counter() when its trunk was called


@dataclass(slots=True)
class InFlight:
    """A dispatched step. Its tokens are a separate output, since the slots that also hold them are donated."""

    plan: StepPlan
    sampled: Sampled | SampledLogprobs
    scores: SampledLogprobs | None = None
    pooled: jax.Array | None = None
    started: float = 0.0


@dataclass(slots=True)
class StepResult:
    """Results of a step, on the host.

    Attributes:
        tokens: by sample: one each, or for a burst a list each.
        logprobs: their log probabilities as numpy arrays, if the sampler is the full one.
        scores: log probabilities of the tokens that follow each tile's tokens, numpy arrays over tiles *
            tile_size, if requested.
        pooled: sum of each tile's hidden states, float32 [tiles, hidden_size], if requested.
        waited: whether the host had to wait for them.
    """

    tokens: Tokens
    logprobs: SampledLogprobs | None = None
    scores: SampledLogprobs | None = None
    pooled: np.ndarray | None = None
    waited: bool = False


class UnderWay(NamedTuple):
    """Pages in transfer between device and host: host pages or places, and the arrays that become ready on arrival."""

    numbers: list[int]
    arrays: list[Any]

    @property
    def there(self) -> bool:
        return all([array.is_ready() for array in self.arrays])


class Runner:
    """Turns plans into calls of a worker, here and in the other processes of the link."""

    def __init__(self, worker: Worker, link: Link | None = None) -> None:
        self.worker, self._link = worker, SingleProcess() if link is None else link
        self.spec, self.programs = worker.spec, worker.programs
        self._spilling, self._staging = deque[UnderWay](), deque[UnderWay]()
        self._layouts = {key: self.spec.layout(key) for key in self.spec.table.trunks()}

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Starts a step without masks, or a burst. Returns before it has run."""
        if plan.steps == 1:
            return self.sample(self.begin(plan))
        layout = self._prepare(plan)
        started = time.perf_counter()
        return InFlight(plan, self._make(Call("burst", plan.burst, pack_burst(layout, plan))), started=started)

    def begin(self, plan: StepPlan) -> PendingSample:
        """Starts a step's trunk and the programs that belong to it."""
        layout = self._prepare(plan)
        packed = layout.pack(plan)
        started = time.perf_counter()
        self._make(Call("trunk", plan.trunk, packed))
        scores = self._score(plan) if any(span.targets for span in plan.spans) else None
        pooled = self._pool(plan) if any(span.pool is not None for span in plan.spans) else None
        return PendingSample(plan, scores, pooled, started)

    def _prepare(self, plan: StepPlan) -> BatchLayout:
        """Applies updates that do not fit into the step's buffer. Returns the buffer's layout."""
        for reset in plan.resets:
            if reset.counted is not None:
                self._count(reset.slot, reset.counted, reset.prompt_len)
        layout = self._layouts[plan.trunk]
        for update in pack_updates(*layout.rest(plan)):
            self._make(Call("update", None, update))
        for start in range(0, len(plan.copies), COPIES):
            self._copy(plan.copies[start : start + COPIES])
        return layout

    def sample(self, step: PendingSample, mask: np.ndarray | None = None) -> InFlight:
        """Starts the sampler of the step begun last. mask: see Call."""
        sampled = self._make(Call("sample", step.plan.sampler, mask))
        return InFlight(step.plan, sampled, step.scores, step.pooled, step.started)

    def read(self, step: InFlight) -> StepResult:
        """Waits for a step's tokens."""
        given = step.sampled, step.scores, step.pooled
        arrays = jax.tree.leaves(given)
        waited = not all([array.is_ready() for array in arrays])
        self._link.wait(lambda: all(array.is_ready() for array in arrays))
        sampled: Sampled | SampledLogprobs
        scores: SampledLogprobs | None
        pooled: np.ndarray | None
        with self._explained():
            sampled, scores, pooled = jax.tree.map(np.asarray, given)
        if step.plan.steps == 1:
            tokens: Tokens = sampled.tokens[: len(step.plan.samples)].tolist()
        else:
            tokens = [sampled.tokens[: span.length, row].tolist() for row, span in enumerate(step.plan.spans)]
        return StepResult(tokens, sampled if isinstance(sampled, SampledLogprobs) else None, scores, pooled, waited)

    def swap(self, swaps: Swaps) -> None:
        """Starts to move pages, before the next step. Returns before they have arrived."""
        for spills in batched(swaps.spills, SWAPS):
            self._spilling.append(
                UnderWay([host for _, _, host in spills], self._move("spill", [(page, host) for _, page, host in spills]))
            )
        for fills in batched(swaps.fills, SWAPS):
            self._move("fill", [(place, page) for _, place, page in fills])
        if swaps.fetches:
            arrays = jax.tree.leaves(self._make(Call("stage", None, np.array(swaps.fetches, np.int32).T)))
            self._staging.append(UnderWay([place for _, place in swaps.fetches], arrays))

    def swapped(self) -> tuple[list[int], list[int]]:
        """Host pages whose spills have finished since the last call, and places whose pages have been staged."""
        return _ended(self._spilling), _ended(self._staging)

    @property
    def moving(self) -> list[Any]:
        """Arrays that are ready when all pages in transfer have arrived."""
        return [self.worker.cache, *(one.arrays for one in (*self._spilling, *self._staging))]

    def wait_for_staged(self) -> None:
        """Waits for the oldest pages in transfer to the device, if any."""
        if self._staging:
            first = self._staging[0]
            self._link.wait(lambda: first.there)
            jax.block_until_ready(first.arrays)

    def _move(self, what: Literal["spill", "fill"], numbers: list[tuple[int, int]]) -> list[Any]:
        padded = np.zeros((2, SWAPS), np.int32)
        padded[:, : len(numbers)] = np.array(numbers, np.int32).reshape(-1, 2).T
        return jax.tree.leaves(self._make(Call(what, None, padded)))

    def _make(self, call: Call) -> Any:
        if not isinstance(self._link, SingleProcess):
            self._link.broadcast(encode(call))
        with self._explained():
            return self.worker.execute(call)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Reports a failed exchange between devices as the end of the process that caused it."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            self._link.settle()
            raise

    def _score(self, plan: StepPlan) -> SampledLogprobs:
        table = self.spec.table
        targets = np.zeros((plan.trunk.tiles, table.tile_size), np.int32)
        for row, (number, offset, length) in zip(targets, table.place(plan.spans).tiles, strict=False):
            wanted = (plan.spans[number].targets or [])[offset : offset + length]
            row[: len(wanted)] = wanted
        scores: SampledLogprobs = self._make(Call("score", ScoreKey(plan.trunk.tiles), targets.reshape(-1)))
        return scores

    def _pool(self, plan: StepPlan) -> jax.Array:
        ranges = np.zeros((plan.trunk.tiles, 2), np.int32)
        for row, (number, offset, length) in zip(ranges, self.spec.table.place(plan.spans).tiles, strict=False):
            pool = plan.spans[number].pool
            if pool is not None and pool < offset + length:
                row[:] = max(pool - offset, 0), length
        pooled: jax.Array = self._make(Call("pool", PoolKey(plan.trunk.tiles), ranges))
        return pooled

    def _copy(self, copies: list[tuple[int, int, int]]) -> None:
        pages = np.zeros((2, COPIES), np.int32)
        pages[:, : len(copies)] = np.array([(source, target) for _, source, target in copies], np.int32).reshape(-1, 2).T
        self._make(Call("copy", None, pages))

    def _count(self, slot: int, tokens: list[int], prompt_len: int) -> None:
        for chunk in count_chunks(slot, tokens, prompt_len, self.spec.model.config.vocab_size):
            self._make(Call("count", None, chunk))

    def memory_parts(self) -> dict[str, int]:
        """See Worker.memory_parts."""
        return self.worker.memory_parts()

    @property
    def on_host(self) -> bool:
        """Whether device memory is this process's host memory."""
        return str(self.spec.mesh.devices.flat[0].platform) == "cpu"

    def warm_up(self, ready: ReadyPrograms, *, progress: Progress, ran: Collection[TrunkKey | SamplerKey] = ()) -> None:
        """Runs each program once through the normal path, with padding only, except those that `ran` before."""
        plans = [plan for plan in self._padding_plans(ready) if plan.trunk not in ran or plan.sampler not in ran]
        for plan in progress_bar(plans, desc="warming up", unit="program", show=progress):
            self._run(plan)
        for burst in ready.bursts():
            self._run(StepPlan(burst.trunk, burst.sampler, steps=burst.steps))
        for key in ready.scores():
            spans = [Span(0, 0, 0, 1, [0], [0], 0 if self.spec.table.pooling else None)] * key.tiles
            trunk = ready.trunk(0, key.tiles)
            self._run(StepPlan(trunk, ready.sampler(trunk, "greedy"), spans))
        self._make(Call("update", None, np.zeros(UPDATE_WORDS, np.int32)))
        self._copy([])
        if self.spec.host_pages:
            self._move("spill", [])
            self._move("fill", [])
        self._count(0, [0], 1)
        self.forget()

    def forget(self) -> None:
        """Frees the counts until a request needs them."""
        self._make(Call("forget"))

    def check(self, ready: ReadyPrograms) -> None:
        """Runs the cheapest step once. Enough for programs that another process has already warmed up."""
        self._run(self._padding_plans(ready)[0])

    def _run(self, plan: StepPlan) -> None:
        self.read(self.dispatch(plan))

    def _padding_plans(self, ready: ReadyPrograms) -> list[StepPlan]:
        """A step with the cheapest sampler for every trunk, then steps for the remaining samplers."""
        table, trunks = self.spec.table, ready.trunks()
        plans = [StepPlan(key, ready.sampler(key, "greedy")) for key in trunks]
        smallest = {table.sample_rows(key): key for key in sorted(trunks, key=table.tokens, reverse=True)}
        covered = {plan.sampler for plan in plans}
        return plans + [StepPlan(smallest[key.rows], key) for key in ready.samplers() if key not in covered]


def _ended(under_way: deque[UnderWay]) -> list[int]:
    """Removes and returns the first ones that have arrived. They started in this order."""
    numbers = list[int]()
    while under_way and under_way[0].there:
        numbers += under_way.popleft().numbers
    return numbers
