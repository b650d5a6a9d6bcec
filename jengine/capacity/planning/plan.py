"""Predicts whether a model fits an absent GPU, how many sequences it can serve, and its maximum speed."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jengine.base.errors import OutOfMemory
from jengine.capacity.planning.ahead_of_time import (
    check_target,
    describe_for,
    describe_on,
    device_limit,
    largest,
)
from jengine.capacity.planning.compiled import Compiled, compiled
from jengine.capacity.planning.estimate import Step
from jengine.capacity.planning.fitting import MORE_MEMORY, Fitting, Room, what_fits
from jengine.capacity.planning.report import Plan, Rate
from jengine.capacity.planning.roofline import Formats, bound, decode, kv_token_bytes, prefill
from jengine.checkpoints.weights import num_bytes
from jengine.core.config import EngineConfig
from jengine.core.quantization import FOUR_BITS
from jengine.devices.device_defaults import sizes
from jengine.devices.device_spec import DeviceSpec, device_spec
from jengine.execution.kernels import implementations
from jengine.execution.kinds import Key, kind_of
from jengine.execution.kv_cache import SHARED
from jengine.execution.memory import DeviceMemory, ProgramMemory, pages_beside
from jengine.execution.programs import program_keys
from jengine.execution.spec import ExecutionSpec
from jengine.models.cache import places
from jengine.parallel.collectives import DATA, TENSOR
from jengine.parallel.layout import Layout
from pallas_kernels.products.weights import is_weight

CONTEXTS = 1024, 8192  # tokens per sequence, in addition to max_model_len
WORKSPACE = 32 << 20  # maximum bytes that XLA gives cuBLAS beside a program's temporaries
BATCHES = 1, 8, 32, 128, 512  # numbers of sequences, up to max_num_seqs


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """Represents an absent GPU in a mesh. Suffices to describe programs for it, but not to compile them."""

    id: int
    device_kind: str
    compute_capability: str
    platform: str = "gpu"
    process_index: int = 0


def make_plan(
    config: EngineConfig, target: str | DeviceSpec, *, exact: bool = False, progress: bool = True
) -> Plan:
    """Computes a plan from the model's configuration and the device's data sheet.

    Args:
        target: the name of a device, see `device_spec`, or its data sheet.
        exact: compile the programs that need the most memory, and the decode steps with the most and the
            fewest rows, and use the sizes of temporaries that XLA reports. Needs the extra `aot`.

    Raises:
        InvalidArgument: the model or target does not support an option.
        ModelError: the model cannot be read, or is not supported.
    """
    device = device_spec(target) if isinstance(target, str) else target
    if exact:
        check_target(device.target or device.name)
        spec = describe_for(config, device.target)
    else:
        spec = described(config, device)
    table = spec.table
    contexts = sorted({min(context, spec.max_model_len) for context in CONTEXTS})
    built = _compiled(config, spec, progress) if exact else []
    programs = {one.key: one.memory for one in built} or estimated(spec)
    memory, pages = _room(config, spec, device, programs)
    formats = formats_of(spec)
    model = spec.model
    batches = sorted({min(batch, spec.max_slots) for batch in (*BATCHES, spec.max_slots)})
    steps = sorted({table.tile_size * tiles for tiles in (1, table.max_tiles, max(1, table.max_tiles // 4))})
    return Plan(
        spec=dataclasses.replace(spec, num_pages=pages),
        device=device,
        formats=formats,
        memory=memory,
        pages=pages,
        total_programs=len(program_keys(spec)),
        programs=programs,
        seconds={one.key: one.seconds for one in built},
        decode=[
            Rate(n, c, bound(decode(model, formats, n, c), formats, device), n * spec.most_pages(c) < pages)
            for n in batches
            for c in contexts
        ],
        prefill=[
            Rate(n, c, bound(prefill(model, formats, n, c), formats, device)) for n in steps for c in contexts
        ],
        contexts=contexts,
        estimates={
            one.key: [one.estimate(spec, device, Step(one.rows, context)) for context in contexts]
            for one in built
        },
        kernels=implementations(spec),
        fitting=[] if pages else _what_fits(config, device, spec, memory),
    )


def described(config: EngineConfig, device: DeviceSpec) -> ExecutionSpec:
    return describe_on(config, _mesh(device, config.layout))


def _room(
    config: EngineConfig, spec: ExecutionSpec, device: DeviceSpec, programs: dict[Key, ProgramMemory]
) -> tuple[DeviceMemory, int]:
    """The use of memory, and the number of pages; 0 if there is no room."""
    memory = DeviceMemory.of(device_limit(config, device), spec, programs.values())
    try:
        pages = pages_beside(config, spec, memory)
    except OutOfMemory:
        pages = 0
    fits = pages * memory.page + memory.beside <= memory.limit  # the requested number of pages may not
    return memory, pages if fits else 0


def _what_fits(
    config: EngineConfig, device: DeviceSpec, spec: ExecutionSpec, memory: DeviceMemory
) -> list[Fitting]:
    def room(changed: EngineConfig) -> Room:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plan has already shown them
            spec = described(changed, device)
        memory, pages = _room(changed, spec, device, estimated(spec))
        return Room(pages * memory.page, max(pages - 1, 0) * spec.page_size)

    return what_fits(
        config, room, most_tokens=spec.max_model_len, weights_fit=memory.weights < device.memory * MORE_MEMORY
    )


def _mesh(device: DeviceSpec, layout: Layout) -> Mesh:
    """Of a stage."""
    axes = {DATA: layout.data, TENSOR: layout.tensor} if layout.data > 1 else {TENSOR: layout.tensor}
    count = layout.stage_devices
    devices = np.array([TargetDevice(i, device.name, device.capability) for i in range(count)], object)
    shape = tuple(axes.values())
    return Mesh(devices.reshape(shape), tuple(axes), axis_types=(AxisType.Auto,) * len(shape))


def _compiled(config: EngineConfig, spec: ExecutionSpec, progress: bool) -> list[Compiled]:
    table = spec.table
    rows = {table.longest(rows, 0) for rows in (table.row_buckets[0], table.max_rows)}
    keys: list[Key] = [*dict.fromkeys([*largest(spec), *sorted(rows)])]
    return compiled(spec, keys, threads=sizes(config, "gpu").compile_threads, progress=progress)


def estimated(spec: ExecutionSpec) -> dict[Key, ProgramMemory]:
    """Upper bounds on the memory of the programs that need most."""
    return {
        key: ProgramMemory(0, 0, 0, kind_of(key).temporaries(spec, key) + WORKSPACE) for key in largest(spec)
    }


def formats_of(spec: ExecutionSpec) -> Formats:
    """Number formats of the spec's parameters and cache."""
    model, devices = spec.model, spec.mesh.size
    dtype = jnp.dtype(model.dtype)
    matrices = [leaf for leaf in jax.tree.leaves(spec.params, is_leaf=is_weight) if len(leaf.shape) > 1]
    width: float = model.format.bits // 8
    # formats vary between weights, and scales count
    if model.quantization in FOUR_BITS or model.config.stored is not None:
        width = num_bytes(matrices) / sum(math.prod(matrix.shape) for matrix in matrices)
    row = places(spec.groups, SHARED)[0][0].shape[-1]
    scale = 4 / row if spec.kv_cache_dtype else 0.0  # float32, for each token and head
    return Formats(
        weight_bytes=width,
        product=model.format.inputs or str(dtype),
        dtype=str(dtype),
        activation_bytes=dtype.itemsize,
        kv_bytes=kv_token_bytes(model, spec.cache_dtype.itemsize + scale),
        devices=devices,
        state_bytes=spec.state_bytes,
    )
