"""Runs steps: dispatches without waiting. Results are read one step later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import batched
from typing import Any, NamedTuple

import jax
import numpy as np

from jengine.base.progress import Progress, progress_bar
from jengine.execution.batch import BatchLayout
from jengine.execution.device_state import ALLOCATE, HostStore
from jengine.execution.draft import pack_drafts
from jengine.execution.executor import Pipeline, Remote, Worker, answers, encode, on_host
from jengine.execution.kinds import (
    AFTER,
    BEFORE,
    FORGET,
    FREE_CACHE,
    KINDS,
    MOVE_WEIGHTS,
    STAGE,
    TRUNK,
    DeviceCall,
    Key,
)
from jengine.execution.kinds.cache import swap_call
from jengine.execution.kinds.inputs import encode_call, write_call
from jengine.execution.kinds.several_steps import pack_burst
from jengine.execution.sampler import Sampled, SampledLogprobs
from jengine.parallel.link import Link, SingleProcess
from jengine.scheduling.step_plan import Encoding, StepPlan, Swaps, Tokens
from jengine.table.program_table import SWAPS
from jengine.table.ready_programs import ReadyPrograms


@dataclass(slots=True)
class PendingSample:
    """A step whose sampler is not dispatched: masks may depend on tokens that are not read yet."""

    plan: StepPlan
    tiles: dict[str, Any]
    drafts: Sampled | None  # of plan.drafting
    started: float  # time.perf_counter() when its trunk was called
    packed: np.ndarray | None = None  # the trunk's buffer


@dataclass(slots=True)
class InFlight:
    """A dispatched step. Its tokens are a separate output, since the slots, which hold them, are donated."""

    plan: StepPlan
    sampled: Sampled | SampledLogprobs
    tiles: dict[str, Any] = field(default_factory=dict)
    drafts: Sampled | None = None
    started: float = 0.0


@dataclass(slots=True)
class StepResult:
    """Results of a step, on the host.

    Attributes:
        tokens: by sample: one each, or for a burst a list each.
        logprobs: their log probabilities as numpy arrays, if the sampler is the full one.
        tiles: numpy arrays from the programs that follow the trunk, by kind, if requested: "score", log
            probabilities of the tokens that follow each tile's tokens, SampledLogprobs over tiles *
            tile_size; "pool", the sum of each tile's hidden states, float32 [tiles, hidden_size].
        waited: whether the host had to wait for them.
    """

    tokens: Tokens
    logprobs: SampledLogprobs | None = None
    tiles: dict[str, Any] = field(default_factory=dict)
    waited: bool = False


class UnderWay(NamedTuple):
    """Pages on their way between device and host: host pages or places, and arrays that become ready."""

    numbers: list[int]
    arrays: list[Any]

    @property
    def there(self) -> bool:
        return all([array.is_ready() for array in self.arrays])


class Runner:
    """Turns plans into calls of a worker, here and in the other processes of the link."""

    def __init__(self, worker: Worker | Pipeline, link: Link | None = None) -> None:
        self.worker, self._link = worker, SingleProcess() if link is None else link
        self.spec, self.programs = worker.spec, worker.programs
        self._spilling, self._staging = deque[UnderWay](), deque[UnderWay]()
        self._adapters: Mapping[int, np.ndarray] = {}
        self._calls = 0  # number of calls so far, which all processes count
        self._layouts = {key: self.spec.layout(key) for key in self.spec.table.trunks()}

    def use_adapters(self, packed: Mapping[int, np.ndarray]) -> None:
        """Plans name LoRA adapters by these numbers; see `LoraShapes.pack`."""
        self._adapters = packed

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Starts a step without masks, or a burst. Returns before it has run."""
        if plan.steps == 1:
            return self.sample(self.begin(plan))
        layout = self._prepare(plan)
        started = time.perf_counter()
        return InFlight(plan, self.call(DeviceCall(plan.burst, pack_burst(layout, plan))), started=started)

    def begin(self, plan: StepPlan) -> PendingSample:
        """Starts a step's drafts and its trunk, and the programs that belong to it."""
        step = self.prepare(plan)
        self.call(DeviceCall(plan.trunk, step.packed, plan.overtakes))
        return self.after_trunk(step)

    def prepare(self, plan: StepPlan) -> PendingSample:
        """Starts what comes before a step's trunk."""
        layout = self._prepare(plan)
        packed = layout.pack(plan)
        started, drafts = time.perf_counter(), None
        if plan.draft is not None:
            drafts = self.call(DeviceCall(plan.draft, pack_drafts(plan.draft, self.spec.page_size, plan)))
        return PendingSample(plan, {}, drafts, started, packed)

    def after_trunk(self, step: PendingSample) -> PendingSample:
        """Starts the programs that read a trunk's results, without the sampler."""
        plan, layout = step.plan, self._layouts[step.plan.trunk]
        calls = [(kind.name, call) for kind in AFTER for call in kind.calls(self.spec, layout, plan)]
        step.tiles = {name: self.call(call) for name, call in calls}
        return step

    def _prepare(self, plan: StepPlan) -> BatchLayout:
        """Makes the calls that come before the trunk. Returns the layout of the step's buffer."""
        layout = self._layouts[plan.trunk]
        for number, place in plan.loras:
            self.call(write_call(self._packed(number), place))
        for kind in BEFORE:
            for call in kind.calls(self.spec, layout, plan):
                self.call(call)
        return layout

    def _packed(self, number: int) -> np.ndarray:
        """An adapter as it is written to a place; 0: zeros."""
        assert self.spec.adapters is not None
        return self._adapters[number] if number else self.spec.adapters.nothing()

    def sample(self, step: PendingSample, mask: np.ndarray | None = None) -> InFlight:
        """Starts the sampler of the step begun last. mask: see DeviceCall."""
        sampled = self.call(DeviceCall(step.plan.sampler, mask))
        return InFlight(step.plan, sampled, step.tiles, step.drafts, step.started)

    def learn_drafts(self, step: PendingSample | InFlight) -> None:
        """Waits for the tokens that the step's draft program has proposed, and enters them into its plan."""
        if step.drafts is None:
            return
        arrays = jax.tree.leaves(step.drafts)
        self._link.wait(lambda: all(array.is_ready() for array in arrays))
        with self._explained():
            tokens = np.asarray(step.drafts.tokens).tolist()
        for span, drafts in zip(step.plan.drafting, tokens, strict=False):
            span.following = drafts[: span.guesses]
        step.drafts = None

    def read(self, step: InFlight) -> StepResult:
        """Waits for a step's tokens."""
        results = step.sampled, step.tiles
        arrays = jax.tree.leaves(results)
        waited = not all([array.is_ready() for array in arrays])
        self._link.wait(lambda: all(array.is_ready() for array in arrays))
        with self._explained():
            sampled, tiles = jax.tree.map(on_host, results)
        self.learn_drafts(step)
        if step.plan.steps == 1:
            tokens: Tokens = sampled.tokens[: len(step.plan.samples)].tolist()
        else:
            tokens = [sampled.tokens[: span.length, row].tolist() for row, span in enumerate(step.plan.spans)]
        return StepResult(tokens, sampled if isinstance(sampled, SampledLogprobs) else None, tiles, waited)

    def encode(self, encoding: Encoding) -> Any:
        """Starts to encode parts of images, before the next step. Returns what is ready when it has."""
        return self.call(encode_call(self.spec, encoding))

    def swap(self, swaps: Swaps) -> None:
        """Starts to move pages, before the next step. Returns before they have arrived."""
        for spills in batched(swaps.spills, SWAPS):
            pages = self.call(swap_call("spill", [(page, host) for _, page, host in spills]))
            self._spilling.append(UnderWay([host for _, _, host in spills], jax.tree.leaves(pages)))
        for fills in batched(swaps.fills, SWAPS):
            self.call(swap_call("fill", [(place, page) for _, place, page in fills]))
        if swaps.fetches:
            arrays = jax.tree.leaves(self.call(DeviceCall(STAGE.name, np.array(swaps.fetches, np.int32).T)))
            self._staging.append(UnderWay([place for _, place in swaps.fetches], arrays))

    def swapped(self) -> tuple[list[int], list[int]]:
        """Host pages whose spills are done since the last call, and places whose pages are staged."""
        return _ended(self._spilling), _ended(self._staging)

    @property
    def host(self) -> HostStore:
        """Pages in host memory."""
        assert isinstance(self.worker, Worker), "stages have host tiers of their own"
        assert self.worker.state.store is not None, "there is no host tier"
        return self.worker.state.store

    @property
    def moving(self) -> list[Any]:
        """Arrays that are ready when all pages in transfer have arrived."""
        return [*self.worker.caches, *(swap.arrays for swap in (*self._spilling, *self._staging))]

    def wait_for_staged(self) -> None:
        """Waits for the oldest pages in transfer to the device, if any."""
        if self._staging:
            first = self._staging[0]
            self._link.wait(lambda: first.there)
            jax.block_until_ready(first.arrays)

    def call(self, call: DeviceCall) -> Any:
        """Makes a call in all processes. Returns its result without waiting for it."""
        if not isinstance(self._link, SingleProcess):
            self._link.broadcast(encode(call))
        self._calls += 1
        with self._explained():
            result = self.worker.execute(call)
        awaited = isinstance(self.worker, Pipeline) and self.worker.awaits_results
        return Remote(self._calls, self._link.results) if awaited and answers(call) else result

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Reports a failed exchange between devices as the end of the process that caused it."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            self._link.settle()
            raise

    def memory_parts(self) -> dict[str, int]:
        return self.worker.memory_parts()

    @property
    def on_host(self) -> bool:
        """Whether device memory is this process's host memory."""
        return str(self.spec.mesh.devices.flat[0].platform) == "cpu"

    def warm_up(
        self, ready: ReadyPrograms, *, progress: Progress, ran: Collection[Key] = (), times: int = 1
    ) -> None:
        """Runs each program some times, with padding only, except those that `ran` before."""
        examples = [call for kind in KINDS for call in kind.examples(self.spec, ready).items()]
        done = {*ran}
        for key, example in progress_bar(examples, desc="warming up", unit="program", show=progress):
            if key not in done:
                done |= self.run_example(key, example, times=times)
        self.forget()

    def run_example(self, key: Key, example: StepPlan | DeviceCall, *, times: int = 1) -> set[Key]:
        """Runs a program's example, see `Kind.examples`. Returns the keys of all programs that ran."""
        for _ in range(times):
            if isinstance(example, StepPlan):
                self.read(self.dispatch(example))
            else:
                self.call(example)
        return {key, example.trunk, example.sampler} if isinstance(example, StepPlan) else {key}

    def forget(self) -> None:
        """Frees the counts until a request needs them."""
        self.call(DeviceCall(FORGET.name))

    def free_cache(self) -> None:
        """Frees the cache and all that belongs to sequences, until `allocate_cache`."""
        self.call(DeviceCall(FREE_CACHE.name))

    def allocate_cache(self) -> None:
        """Allocates the cache again."""
        self.call(DeviceCall(ALLOCATE))

    def move_weights(self, *, away: bool, keep: bool = True) -> None:
        """Moves the weights to the host's memory, or frees the model's unless `keep`; or brings them back."""
        self.call(DeviceCall(MOVE_WEIGHTS.name, np.array([away, keep], np.int32)))

    def check(self, ready: ReadyPrograms) -> None:
        """Runs the cheapest step once. Enough for programs that another process has already warmed up."""
        self.read(self.dispatch(next(iter(TRUNK.examples(self.spec, ready).values()))))


def _ended(under_way: deque[UnderWay]) -> list[int]:
    """Removes and returns the first ones that have arrived. They started in this order."""
    numbers = list[int]()
    while under_way and under_way[0].there:
        numbers += under_way.popleft().numbers
    return numbers
