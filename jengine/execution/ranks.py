"""Ranks: groups of devices with sequences of their own, which run trunks together, since they share experts.

Each rank has its state and runs most programs by itself, on its own devices. For a trunk, the arrays of all
ranks become those of one program on all devices, and its results become each rank's again. Nothing is copied:
a joint array is made of the ranks' arrays on single devices. The cache stays joint until a rank uses it
alone.

With several stages, each stage has a joint state, and one pipeline passes trunks through all stages. Each of
the other programs runs on one rank, in a pipeline of that rank's devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.execution.device_state import ByKey, DeviceState
from jengine.execution.executor import Pipeline, StagePrograms, Worker, as_one, by_stage
from jengine.execution.kinds import TRUNK, DeviceCall, Kind, call_kind
from jengine.execution.memory import device_bytes
from jengine.execution.programs import Programs
from jengine.execution.runner import InFlight, PendingSample, Runner, StepResult
from jengine.execution.spec import ExecutionSpec
from jengine.models import Params
from jengine.scheduling.step_plan import StepPlan, Swaps
from jengine.table.program_table import TrunkKey


class RankState(DeviceState):
    """A rank's part of the state. `joint` allocates its cache and slots."""

    def allocate(self) -> None:
        pass


class JointState(DeviceState):
    """The state of all ranks.

    Attributes:
        states: of the ranks, in order.
    """

    def __init__(
        self, spec: ExecutionSpec, programs: ByKey, params: Params, of_ranks: Sequence[ByKey]
    ) -> None:
        super().__init__(spec, programs, params)
        self.specs = [spec.rank(rank) for rank in range(spec.ranks)]
        each = divided(self.leaves, [rank_spec.leaves for rank_spec in self.specs])
        self.states = [
            RankState(rank_spec, programs_of_rank, leaves)
            for rank_spec, programs_of_rank, leaves in zip(self.specs, of_ranks, each, strict=True)
        ]
        self._share()

    def run(self, key: TrunkKey, array: np.ndarray) -> None:
        """Runs a trunk on all ranks' packed batches."""
        if self.cache is None:
            self.cache = joined([state.cache for state in self.states], self.spec.cache)
        self.slots = joined([state.slots for state in self.states], self.spec.slots)
        for state in self.states:
            state.cache = state.slots = None
        TRUNK.run(self, key, array)
        self._share()

    def divide_cache(self) -> None:
        """Gives each rank its part of the cache, until the next trunk."""
        if self.cache is not None:
            parts = divided(self.cache, [rank_spec.cache for rank_spec in self.specs])
            self.cache = None
            for state, part in zip(self.states, parts, strict=True):
                state.cache = part

    def _share(self) -> None:
        """Gives each rank its part of a trunk's results."""
        results = self.slots, self.to_sample, self.tiles
        self.slots = self.to_sample = self.tiles = None
        for state, (slots, to_sample, tiles) in zip(
            self.states,
            divided(results, [_own(results, rank_spec, self.spec.ranks) for rank_spec in self.specs]),
            strict=True,
        ):
            state.slots, state.to_sample, state.tiles = slots, to_sample, tiles


def joined(parts: Sequence[Any], like: Any) -> Any:
    """Trees of ranks' arrays as one, like these, on the devices of all ranks. Copies nothing."""

    def one(like: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.Array:
        shards = [shard for array in arrays for shard in _by_device(array)]
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)

    return jax.tree.map(one, like, *parts)


def divided(tree: Any, likes: Sequence[Any]) -> list[Any]:
    """Each rank's part, like these, of a tree of arrays on the devices of all ranks. Copies nothing."""
    leaves, structure = jax.tree.flatten(tree)
    shards = [_by_device(leaf) for leaf in leaves]
    parts = []
    for rank, like in enumerate(likes):
        count = len(shards[0]) // len(likes)
        part = slice(rank * count, (rank + 1) * count)
        made = [
            jax.make_array_from_single_device_arrays(array.shape, array.sharding, each[part])
            for array, each in zip(jax.tree.leaves(like), shards, strict=True)
        ]
        parts.append(jax.tree.unflatten(structure, made))
    return parts


def _by_device(array: jax.Array) -> list[jax.Array]:
    """An array's parts on each device, in the order of the mesh."""
    return [shard.data for shard in array.addressable_shards]


def _own(results: Any, spec: ExecutionSpec, ranks: int) -> Any:
    """The abstract results of one rank, whole on each of its devices."""

    def own(x: jax.Array) -> jax.ShapeDtypeStruct:
        shape = x.shape[0] // ranks, *x.shape[1:]
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=spec.replicated)

    return jax.tree.map(own, results)


class JointWorker(Worker):
    """The trunks of all ranks, and their state."""

    def __init__(self, joint: JointState, programs: Programs) -> None:
        self.spec, self.programs, self.state = joint.spec, programs, joint
        self._joint = joint

    def execute(self, call: DeviceCall) -> Any:
        assert isinstance(call.key, TrunkKey) and call.array is not None, "ranks run others apart"
        return self._joint.run(call.key, call.array)

    def memory_parts(self) -> dict[str, int]:
        spec, count = self.spec, self.spec.mesh.size
        parts = {"weights": spec.leaves, "cache": spec.cache, "slots and counts": spec.slots}
        return {name: count * device_bytes(tree) for name, tree in parts.items()}


class RankWorker(Worker):
    """A rank's programs and its state."""

    def __init__(self, joint: JointState, rank: int, programs: Programs) -> None:
        self.spec, self.programs, self.state = joint.specs[rank], programs, joint.states[rank]
        self._joint = joint

    def execute(self, call: DeviceCall) -> Any:
        kind = call_kind(call.key)
        assert not (isinstance(kind, Kind) and kind.joint), f"{kind.name} runs on all ranks"
        if isinstance(kind, Kind) and kind.uses_cache:
            self._joint.divide_cache()
        return kind.run(self.state, call.key, call.array)


class RanksRunner(Runner):
    """The runners of all ranks. As a Runner, it runs the same steps on every rank: to measure them.

    Args:
        joint: runs the trunks.
    """

    def __init__(self, joint: Worker | Pipeline, ranks: Sequence[Worker | Pipeline]) -> None:
        super().__init__(joint)
        self.runners = [Runner(rank) for rank in ranks]

    def begin_all(self, plans: Mapping[int, StepPlan], key: TrunkKey) -> dict[int, PendingSample]:
        """Starts the steps of some ranks, whose plans have this trunk. The others join with padding."""
        prepared = {rank: self.runners[rank].prepare(plan) for rank, plan in plans.items()}
        nothing = self._layouts[key].pack(StepPlan(key, next(iter(plans.values())).sampler))
        for rank, plan in plans.items():
            self.runners[rank].worker.await_samples(plan.overtakes)
        packed: list[Any] = [nothing] * len(self.runners)
        for rank, step in prepared.items():
            packed[rank] = step.packed
        self.worker.execute(DeviceCall(key, np.concatenate(packed)))
        return {rank: self.runners[rank].after_trunk(step) for rank, step in prepared.items()}

    # --- the same on every rank -------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> Any:
        started = self.begin_all(dict.fromkeys(range(len(self.runners)), plan), plan.trunk)
        return [*started.values()]

    def sample(self, step: Any, mask: np.ndarray | None = None) -> Any:
        return [runner.sample(rank_step, mask) for runner, rank_step in zip(self.runners, step, strict=True)]

    def read(self, step: Any) -> StepResult:
        steps: list[InFlight] = step
        first, *_ = [runner.read(rank_step) for runner, rank_step in zip(self.runners, steps, strict=True)]
        return first

    def call(self, call: DeviceCall) -> Any:
        return [runner.call(call) for runner in self.runners]

    def swap(self, swaps: Swaps) -> None:
        for runner in self.runners:
            runner.swap(swaps)

    def swapped(self) -> tuple[list[int], list[int]]:
        first, *_ = [runner.swapped() for runner in self.runners]
        return first

    @property
    def moving(self) -> list[Any]:
        return [runner.moving for runner in self.runners]


def make_ranks(
    spec: ExecutionSpec,
    joint: Programs | StagePrograms,
    params: Sequence[Params],
    of_ranks: Sequence[Programs | StagePrograms],
) -> RanksRunner:
    """The runners of all ranks.

    Args:
        joint: the programs that ranks run together.
        params: of each stage.
        of_ranks: the other programs, of each rank.
    """
    joints, workers = list[Worker](), [list[Worker]() for _ in of_ranks]
    each = zip(spec.stages, by_stage(joint), params, *map(by_stage, of_ranks), strict=True)
    for stage, programs, leaves, *of_each_rank in each:
        state = JointState(stage, programs, leaves, of_each_rank)
        joints.append(JointWorker(state, programs))
        for rank, (mine, programs_of_rank) in enumerate(zip(workers, of_each_rank, strict=True)):
            mine.append(RankWorker(state, rank, programs_of_rank))
    ranks = [
        as_one(spec.rank(rank), programs, mine)
        for rank, (programs, mine) in enumerate(zip(of_ranks, workers, strict=True))
    ]
    return RanksRunner(as_one(spec, joint, joints), ranks)
