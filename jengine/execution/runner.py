"""Runs steps: dispatch without waiting; results are read one step later."""

from __future__ import annotations

import time
from dataclasses import dataclass

import jax
import numpy as np
from tqdm import tqdm

from jengine.execution.programs import ALLOCATE, Programs
from jengine.execution.sampler import Sampled, SampledLogprobs
from jengine.execution.spec import ExecutionSpec
from jengine.models import Params
from jengine.program_table import TrunkKey
from jengine.scheduling.step_plan import StepPlan


@dataclass(slots=True)
class InFlight:
    """A dispatched step. Its tokens are an output of their own: the slots they are also in are donated on."""

    plan: StepPlan
    sampled: Sampled | SampledLogprobs


@dataclass(slots=True)
class StepResult:
    """A step's tokens on the host, in sampler rows, and its log probabilities where the sampler gives them."""

    tokens: list[int]
    logprobs: SampledLogprobs | None  # of numpy arrays


class Runner:
    """Owns the device state: weights, cache, slots."""

    def __init__(self, spec: ExecutionSpec, programs: Programs, params: Params) -> None:
        self.spec, self.programs, self.params = spec, programs, params
        self.cache, self.slots = programs[ALLOCATE]()
        self._layouts = {key: spec.layout(key) for key in spec.table.trunks()}

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Start a step; returns before it has run."""
        packed = jax.device_put(self._layouts[plan.trunk].pack(plan), self.spec.replicated)
        self.cache, self.slots, to_sample = self.programs[plan.trunk](self.params, self.cache, self.slots, packed)
        last_token, sampled = self.programs[plan.sampler](self.params, self.slots.last_token, self.slots.sampling, to_sample)
        self.slots = self.slots._replace(last_token=last_token)
        for array in sampled:
            array.copy_to_host_async()
        return InFlight(plan, sampled)

    def read(self, step: InFlight) -> StepResult:
        """Wait for a step's tokens."""
        sampled = jax.tree.map(np.asarray, step.sampled)
        return StepResult(sampled.tokens.tolist(), sampled if isinstance(sampled, SampledLogprobs) else None)

    def warm_up(self, *, progress: bool) -> None:
        """Run every program through `dispatch` with padding alone, and note what each trunk costs."""
        plans = self._padding_plans()
        for plan in tqdm(plans, "warming up", unit="program", disable=not progress, leave=False):
            self.read(self.dispatch(plan))
            start = time.perf_counter()
            self.read(self.dispatch(plan))
            self.programs.costs.setdefault(str(plan.trunk), time.perf_counter() - start)

    def check(self) -> None:
        """Run the cheapest step once: enough for programs that another process has already warmed up."""
        self.read(self.dispatch(self._padding_plans()[0]))

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
