"""Runs steps: dispatch without waiting; results are read one step later."""

from __future__ import annotations

import time
from dataclasses import dataclass

import jax
import numpy as np
from tqdm import tqdm

from jengine.execution.logits import ALL_ALLOWED, count_chunks, mask_words
from jengine.execution.programs import ALLOCATE, ALLOCATE_COUNTS, COUNT, Programs
from jengine.execution.sampler import Sampled, SampledLogprobs
from jengine.execution.spec import ExecutionSpec
from jengine.execution.trunk import ToSample
from jengine.models import Params
from jengine.program_table import ScoreKey, TrunkKey
from jengine.scheduling.step_plan import StepPlan, Tile

TIMED_RUNS = 3  # the fastest counts: on a busy machine a single one misleads the scheduler until the programs are compiled again


@dataclass(slots=True)
class Begun:
    """A step whose trunk is dispatched and whose sampler is not: masks may depend on tokens that are still to be read."""

    plan: StepPlan
    to_sample: ToSample
    scores: SampledLogprobs | None


@dataclass(slots=True)
class InFlight:
    """A dispatched step. Its tokens are an output of their own: the slots they are also in are donated on."""

    plan: StepPlan
    sampled: Sampled | SampledLogprobs
    scores: SampledLogprobs | None = None


@dataclass(slots=True)
class StepResult:
    """What a step gave, on the host.

    Attributes:
        tokens: in sampler rows.
        logprobs: of them, numpy arrays, where the sampler is the full one.
        scores: of the tokens that follow each tile's tokens, numpy arrays over tiles * tile_size, where a tile asked for it.
    """

    tokens: list[int]
    logprobs: SampledLogprobs | None = None
    scores: SampledLogprobs | None = None


class Runner:
    """Owns the device state: weights, cache, slots, and counts once a request has needed them."""

    def __init__(self, spec: ExecutionSpec, programs: Programs, params: Params) -> None:
        self.spec, self.programs, self.params = spec, programs, params
        self.cache, self.slots = programs[ALLOCATE]()
        self._counts: jax.Array | None = None
        self._layouts = {key: spec.layout(key) for key in spec.table.trunks()}
        self._no_mask: dict[int, jax.Array] = {}  # by rows

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Start a step that needs no mask; returns before it has run."""
        return self.sample(self.begin(plan))

    def begin(self, plan: StepPlan) -> Begun:
        """Start a step's trunk, and what comes with it."""
        for reset in plan.resets:
            if reset.counted is not None:
                self._count(reset.slot, reset.counted, reset.prompt_len)
        packed = self._put(self._layouts[plan.trunk].pack(plan))
        self.cache, self.slots, to_sample, tiles = self.programs[plan.trunk](self.params, self.cache, self.slots, packed)
        scores = self._score(plan, tiles) if any(tile.scored for tile in plan.tiles) else None
        return Begun(plan, to_sample, scores)

    def sample(self, step: Begun, mask: np.ndarray | None = None) -> InFlight:
        """Start a step's sampler. mask: uint32 [sampler rows, words], see logits.mask_words; None allows every token."""
        key, slots = step.plan.sampler, self.slots
        program = self.programs[key]
        if key.variant == "full":
            state = slots.last_token, self._get_counts()
            allowed = self._all_allowed(key.rows) if mask is None else self._put(mask)
            (last_token, self._counts), sampled = program(self.params, state, slots.sampling, step.to_sample, allowed)
        else:
            last_token, sampled = program(self.params, slots.last_token, slots.sampling, step.to_sample)
        self.slots = slots._replace(last_token=last_token)
        for array in sampled:
            array.copy_to_host_async()
        return InFlight(step.plan, sampled, step.scores)

    def read(self, step: InFlight) -> StepResult:
        """Wait for a step's tokens."""
        sampled: Sampled | SampledLogprobs
        scores: SampledLogprobs | None
        sampled, scores = jax.tree.map(np.asarray, (step.sampled, step.scores))
        return StepResult(sampled.tokens.tolist(), sampled if isinstance(sampled, SampledLogprobs) else None, scores)

    def _put(self, array: np.ndarray) -> jax.Array:
        placed: jax.Array = jax.device_put(array, self.spec.replicated)
        return placed

    def _score(self, plan: StepPlan, hidden: jax.Array) -> SampledLogprobs:
        size = self.spec.table.tile_size
        targets = np.zeros((plan.trunk.tiles, size), np.int32)
        for row, tile in zip(targets, plan.tiles, strict=False):
            if tile.scored is not None:
                row[: len(tile.scored[1])] = tile.scored[1]
        scores: SampledLogprobs = self.programs[ScoreKey(plan.trunk.tiles)](self.params, hidden, self._put(targets.reshape(-1)))
        for array in scores:
            array.copy_to_host_async()
        return scores

    def _get_counts(self) -> jax.Array:
        counts: jax.Array = self.programs[ALLOCATE_COUNTS]() if self._counts is None else self._counts
        return counts

    def _count(self, slot: int, tokens: list[int], prompt_len: int) -> None:
        for chunk in count_chunks(slot, tokens, prompt_len, self.spec.model.config.vocab_size):
            self._counts = self.programs[COUNT](self._get_counts(), self._put(chunk))

    def _all_allowed(self, rows: int) -> jax.Array:
        if rows not in self._no_mask:
            words = mask_words(self.spec.model.config.vocab_size)
            self._no_mask[rows] = self._put(np.full((rows, words), ALL_ALLOWED))
        return self._no_mask[rows]

    def warm_up(self, *, progress: bool) -> None:
        """Run every program through the real call path with padding alone, and note what each trunk costs."""
        plans = self._padding_plans()
        for plan in tqdm(plans, "warming up", unit="program", disable=not progress, leave=False):
            self._run(plan)
            if str(plan.trunk) not in self.programs.costs:
                self.programs.costs[str(plan.trunk)] = min(self._timed(plan) for _ in range(TIMED_RUNS))
        for key in self.spec.table.scores():
            tiles = [Tile(0, 0, [], False, scored=(None, [0]))] * key.tiles
            trunk = self.spec.table.trunk(0, key.tiles)
            self._run(StepPlan(trunk, self.spec.table.sampler(trunk, "greedy"), tiles=tiles))
        self._count(0, [0], 1)
        self._counts = None  # allocated again when a request needs it

    def check(self) -> None:
        """Run the cheapest step once: enough for programs that another process has already warmed up."""
        self._run(self._padding_plans()[0])

    def _timed(self, plan: StepPlan) -> float:
        start = time.perf_counter()
        self._run(plan)
        return time.perf_counter() - start

    def _run(self, plan: StepPlan) -> None:
        self.read(self.dispatch(plan))

    def trunk_costs(self) -> dict[TrunkKey, float]:
        """Seconds of each trunk with its cheapest sampler, as measured by the warm-up that compiled them."""
        return {key: self.programs.costs[str(key)] for key in self.spec.table.trunks() if str(key) in self.programs.costs}

    def _padding_plans(self) -> list[StepPlan]:
        """For every trunk a step with the greedy sampler, then steps for the samplers that are left."""
        table = self.spec.table
        plans = [StepPlan(key, table.sampler(key, "greedy")) for key in table.trunks()]
        smallest = {table.sample_rows(key): key for key in sorted(table.trunks(), key=table.tokens, reverse=True)}
        covered = {plan.sampler for plan in plans}
        return plans + [StepPlan(smallest[key.rows], key) for key in table.samplers() if key not in covered]
