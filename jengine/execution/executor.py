"""What executes an engine's calls: a worker, the stages of a pipeline, or other processes. Its results."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import batched, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jengine.base.progress import Progress
from jengine.execution.device_state import DeviceState
from jengine.execution.kinds import FREE_CACHE, DeviceCall, Key, call_kind, kind_of, named
from jengine.execution.memory import ProgramMemory, device_bytes
from jengine.execution.programs import Programs, Running, program_keys
from jengine.execution.sampler import Sampled, SampledLogprobs
from jengine.execution.spec import ExecutionSpec
from jengine.models import Params
from jengine.table.program_table import PoolKey, SamplerKey, ScoreKey, TrunkKey

TOGETHER = 8  # programs that each stage gets before the next ones
STAGE = "stage"  # a mesh's axis over the two stages at a border


def answers(call: DeviceCall) -> bool:
    """Whether a call has a result that the host reads, from the last stage of a pipeline."""
    return isinstance(call.key, SamplerKey | ScoreKey | PoolKey)


class StagePrograms:
    """The programs of this process's stages as one. A key is ready when all that have such a program have it.

    Args:
        keys: of the programs that the stages have now; another process may have the stage of some.
    """

    def __init__(self, stages: Sequence[Programs], keys: Sequence[Key]) -> None:
        self.stages = stages
        self._keys = {*keys}

    def obtain(
        self, keys: Sequence[Key], *, progress: Progress = False, running: Running | None = None
    ) -> Generator[Key]:
        """Obtains the others, as Programs does: all stages have a program before any has the one after it."""
        for some in batched(keys, TOGETHER):
            for stage in self.stages:
                known = {*program_keys(stage.spec)}
                mine = [key for key in some if key in known]
                deque(stage.obtain(mine, progress=progress, running=running), maxlen=0)
            self._keys.update(some)
            yield from (key for key in some if key in self)

    def prefer(self, keys: Sequence[Key]) -> None:
        for stage in self.stages:
            stage.prefer(keys)

    def __contains__(self, key: Key) -> bool:
        everywhere = kind_of(key).everywhere
        stages = [stage for stage in self.stages if everywhere or stage.spec.stage.last]
        return key in self._keys and all(key in stage for stage in stages)

    @property
    def compiled(self) -> int:
        return sum(stage.compiled for stage in self.stages)

    @property
    def loaded(self) -> int:
        return sum(stage.loaded for stage in self.stages)

    @property
    def memory(self) -> dict[Key, ProgramMemory]:
        """For each program, the memory in the stage where it works with the most."""
        every = [item for stage in self.stages for item in stage.memory.items()]
        return dict(sorted(every, key=lambda item: item[1].working))


class Pipeline:
    """Executes calls in the stages of which this process has devices. Hidden states pass from one to the next
    on the devices. No stage waits for another's results before it has to: programs wait for their arguments.

    In one process, sampled tokens pass from the last stage to the others on the devices, too. In several, the
    last stage's process sends them to process 0 (see executor.py), whose next plans contain them.

    Args:
        workers: of these stages.
    """

    def __init__(self, spec: ExecutionSpec, programs: StagePrograms, workers: Sequence[Worker]) -> None:
        self.spec, self.programs = spec, programs
        mine = {worker.spec.stage.index: worker for worker in workers}
        # None: another process has its devices
        self.stages = [mine.get(index) for index in range(len(spec.stages))]
        self._alone = jax.process_count() == 1
        tokens = {spec.table.tokens(key) for key in spec.table.trunks()}
        shapes = [(count, spec.model.config.hidden_size) for count in tokens]
        self._borders = [
            _border(before, behind, shapes) if not self._alone else None
            for before, behind in pairwise(spec.stages)
        ]
        # SlotState.last after each of the last samplers, for all stages but the last: a trunk uses the newest
        # that it has to wait for
        self._sampled: deque[list[jax.Array]] = deque()

    @property
    def workers(self) -> list[Worker]:
        """The stages of this process."""
        return [stage for stage in self.stages if stage is not None]

    @property
    def sends_results(self) -> bool:
        """Whether this process sends the last stage's results to process 0."""
        first = self.spec.stages[-1].mesh.devices.flat[0].process_index
        return self.awaits_results and first == jax.process_index()

    @property
    def awaits_results(self) -> bool:
        """Whether process 0 gets the last stage's results from another process."""
        return all(device.process_index for device in self.spec.stages[-1].mesh.devices.flat)

    def execute(self, call: DeviceCall) -> Any:
        """Executes a call without waiting; see `CallKind.run`. If several stages have a result, a list."""
        if isinstance(call.key, TrunkKey):
            return self._run_trunk(call)
        if not call_kind(call.key).everywhere:
            last = self.stages[-1]
            result = None if last is None else last.execute(call)
            if isinstance(call.key, SamplerKey) and self._alone and last is not None:
                arrays = last.state.slots.last
                others = [stage.spec.replicated for stage in self.workers[:-1]]
                self._sampled.append([jax.device_put(arrays, place) for place in others])
            return result
        if call.key == FREE_CACHE.name:
            self._sampled.clear()
        return [stage.execute(call) for stage in self.workers]

    def await_samples(self, overtakes: int) -> None:
        """The next trunk waits for all samples but those of the last `overtakes` steps."""
        newest: list[jax.Array] = []
        while len(self._sampled) > overtakes:
            newest = self._sampled.popleft()
        for worker, last in zip(self.workers, newest, strict=False):
            worker.state.slots = worker.state.slots._replace(last=last)

    def _run_trunk(self, call: DeviceCall) -> None:
        self.await_samples(call.overtakes)
        shape = self.spec.table.tokens(call.key), self.spec.model.config.hidden_size  # type: ignore[arg-type]
        hidden: jax.Array | None = None
        for stage, border in zip(self.stages, [None, *self._borders], strict=True):
            if border is not None:
                hidden = border.passed(hidden, shape)
            elif hidden is not None and stage is not None:
                hidden = jax.device_put(hidden, stage.spec.entering(call.key).sharding)  # type: ignore[arg-type]
            if stage is not None:
                stage.state.entering = hidden
                stage.execute(call)
                hidden, stage.state.leaving = stage.state.leaving, None
            else:
                hidden = None

    @property
    def caches(self) -> list[Any]:
        """The arrays of each stage's cache."""
        return [stage.state.cache for stage in self.workers]

    def memory_parts(self) -> dict[str, int]:
        """Bytes on this process's devices, by use."""
        parts = [stage.memory_parts() for stage in self.workers]
        return {name: sum(part.get(name, 0) for part in parts) for name in parts[0]}


def _border(before: ExecutionSpec, behind: ExecutionSpec, shapes: Sequence[tuple[int, int]]) -> Border | None:
    """What passes hidden states between two stages; None: this process has all of their devices, or none."""
    devices = [*before.mesh.devices.flat, *behind.mesh.devices.flat]
    mine = [device for device in devices if device.process_index == jax.process_index()]
    return (
        Border(before.mesh, behind.mesh, shapes, before.model.dtype) if 0 < len(mine) < len(devices) else None
    )


class Border:
    """Passes arrays from the devices of a stage to those of the next one, in another process: programs of one
    permutation over the devices of both, which all of their processes call in the same order. A process
    without the array passes zeros in its place.

    Args:
        before, behind: the meshes of the stages.
        shapes: shapes of the arrays, which are whole on each device of a stage.
    """

    def __init__(
        self, before: Mesh, behind: Mesh, shapes: Iterable[tuple[int, int]], dtype: jax.typing.DTypeLike
    ) -> None:
        devices = np.stack([before.devices.flatten(), behind.devices.flatten()])
        mesh = Mesh(devices, (STAGE, "copy"), axis_types=(AxisType.Auto,) * 2)
        self._sharding = NamedSharding(mesh, PartitionSpec(STAGE))
        self._target = NamedSharding(behind, PartitionSpec())
        mine = jax.process_index()
        self._from, self._to = (
            [device for device in row if device.process_index == mine] for row in devices.tolist()
        )
        self._programs = {shape: self._compiled(shape, dtype) for shape in {*shapes}}
        self._zeros = {
            shape: [jax.device_put(jnp.zeros(shape, dtype), device) for device in self._to]
            for shape in self._programs
        }

    def _compiled(self, shape: tuple[int, int], dtype: jax.typing.DTypeLike) -> jax.stages.Compiled:
        passing = partial(lax.ppermute, axis_name=STAGE, perm=[(0, 1)])
        spec = self._sharding.spec
        mapped = jax.shard_map(
            passing, mesh=self._sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        both = jax.ShapeDtypeStruct((2 * shape[0], *shape[1:]), dtype, sharding=self._sharding)
        return jax.jit(mapped).lower(both).compile()

    def passed(self, array: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
        """The array on this process's devices of the stage behind; None if it has none of them. array: None
        if this process has no devices of the stage before.
        """
        shards = {} if array is None else {part.device: part.data for part in array.addressable_shards}
        parts = [*[shards[device] for device in self._from], *self._zeros[shape]]
        both = jax.make_array_from_single_device_arrays((2 * shape[0], *shape[1:]), self._sharding, parts)
        moved = {part.device: part.data for part in self._programs[shape](both).addressable_shards}
        if not self._to:
            return None
        mine = [moved[device] for device in self._to]
        return jax.make_array_from_single_device_arrays(shape, self._target, mine)


def encode(call: DeviceCall) -> bytes:
    """A call for other processes."""
    array = None if call.array is None else (call.array.dtype.str, call.array.shape, call.array.tobytes())
    return msgspec.msgpack.encode((call_kind(call.key).name, call.key, array, call.overtakes))


def decode(frame: bytes) -> DeviceCall:
    """The call of a frame."""
    name, key, array, overtakes = msgspec.msgpack.decode(frame)
    return DeviceCall(
        msgspec.convert(key, named(name).key),
        None if array is None else np.frombuffer(array[2], array[0]).reshape(array[1]),
        overtakes,
    )


class Worker:
    """Programs, and the state of the devices that they change.

    Args:
        draft: parameters of the draft model, if there is one.
        encoder: those of the images' encoder, if there is one.
    """

    def __init__(
        self,
        spec: ExecutionSpec,
        programs: Programs,
        params: Params,
        draft: Params = None,
        encoder: Params = None,
    ) -> None:
        self.spec, self.programs = spec, programs
        self.state = DeviceState(spec, programs, params, draft, encoder)

    def execute(self, call: DeviceCall) -> Any:
        """Executes a call without waiting for its result; see `CallKind.run`."""
        return call_kind(call.key).run(self.state, call.key, call.array)

    def await_samples(self, overtakes: int) -> None:
        """Does nothing: a device runs its programs in order."""

    @property
    def caches(self) -> list[Any]:
        """The cache's arrays."""
        return [self.state.cache]

    def memory_parts(self) -> dict[str, int]:
        """Bytes on this process's devices, by use."""
        devices, state = len(self.spec.mesh.local_devices), self.state
        parts = {
            "weights": (state.leaves, state.draft_only_leaves, state.stacks, state.encoder_leaves),
            "cache": state.cache,
            "slots and counts": (state.slots, state.counts),
        }
        if state.pool is not None:
            parts["embeddings of images"] = state.pool
        sizes = {name: devices * device_bytes(tree) for name, tree in parts.items()}
        memory = [*self.programs.memory.values()]
        return {
            **sizes,
            "programs' code": sum([program.code for program in memory]),
            "programs' temporaries, of the largest": devices
            * max([program.working for program in memory], default=0),
        }


TYPES: tuple[type, ...] = (Sampled, SampledLogprobs)


def make_worker(
    spec: ExecutionSpec,
    programs: Programs | StagePrograms,
    params: Sequence[Params],
    draft: Params = None,
    encoder: Params = None,
) -> Worker | Pipeline:
    """Args:
    params: of each stage.
    """
    if not isinstance(programs, StagePrograms):
        (whole,) = params
        return Worker(spec, programs, whole, draft, encoder)
    parts = zip(spec.local_stages, programs.stages, params, strict=True)
    return as_one(spec, programs, [Worker(*part) for part in parts])


def as_one(
    spec: ExecutionSpec, programs: Programs | StagePrograms, workers: Sequence[Worker]
) -> Worker | Pipeline:
    """The workers of all stages, or of the only one, as one."""
    if isinstance(programs, StagePrograms):
        return Pipeline(spec, programs, workers)
    (whole,) = workers
    return whole


def by_stage(programs: Programs | StagePrograms) -> Sequence[Programs]:
    """The programs of each stage, or of the only one."""
    return programs.stages if isinstance(programs, StagePrograms) else [programs]


class Remote:
    """The result of a call, by the call's number. A leaf in the place of arrays."""

    def __init__(self, number: int, frames: dict[int, bytes]) -> None:
        self._number, self._frames = number, frames

    def is_ready(self) -> bool:
        return self._number in self._frames

    def value(self) -> Any:
        """The arrays. They must be ready; may be called once."""
        return decode_result(self._frames.pop(self._number))


def on_host(leaf: Any) -> Any:
    """A result's arrays, as numpy arrays."""
    return leaf.value() if isinstance(leaf, Remote) else np.asarray(leaf)


class ResultSender:
    """Sends results in a thread, in order, as soon as each is ready."""

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self._send = send
        self._waiting: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="results", daemon=True).start()

    def put(self, number: int, result: Any) -> None:
        self._waiting.put((number, result))

    def _run(self) -> None:
        while True:
            number, result = self._waiting.get()
            try:
                frame = encode_result(result)
            except jax.errors.JaxRuntimeError:
                return  # another process has ended, as process 0 will notice
            self._send(number, frame)


def encode_result(result: Any) -> bytes:
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(result)]
    kind = next((i for i, cls in enumerate(TYPES) if isinstance(result, cls)), -1)
    parts = [(array.dtype.str, array.shape, array.tobytes()) for array in arrays]
    return msgspec.msgpack.encode((kind, parts))


def decode_result(frame: bytes) -> Any:
    kind, parts = msgspec.msgpack.decode(frame)
    arrays = [np.frombuffer(data, dtype).reshape(shape) for dtype, shape, data in parts]
    return arrays[0] if kind < 0 else TYPES[kind](*arrays)
