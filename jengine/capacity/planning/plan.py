"""Predicts whether a model fits absent GPUs, how it is best spread over them, how many sequences it can
serve, and its speed.
"""

from __future__ import annotations

import dataclasses
import warnings

from jengine.capacity.planning.ahead_of_time import check_target, describe_for, device_limit, largest
from jengine.capacity.planning.layouts import Choice
from jengine.capacity.planning.links import Cluster
from jengine.capacity.planning.memory import (
    MORE_MEMORY,
    Fitting,
    described,
    estimated,
    fits,
    formats_of,
    room,
    what_fits,
)
from jengine.capacity.planning.report import Plan, Rate
from jengine.capacity.planning.roofline import Batch, Roofline
from jengine.core.config import EngineConfig
from jengine.devices.device_defaults import sizes
from jengine.devices.device_spec import DeviceSpec, device_spec
from jengine.execution.kernels import implementations
from jengine.execution.memory import DeviceMemory
from jengine.execution.programs import UNTUNED, compile_all, memory_of, program_keys
from jengine.execution.spec import ExecutionSpec

CONTEXTS = 1024, 8192  # tokens per sequence, in addition to max_model_len
BATCHES = 1, 8, 32, 128, 512  # numbers of sequences, up to max_num_seqs


def make_plan(
    config: EngineConfig, target: str | DeviceSpec, *, exact: bool = False, progress: bool = True
) -> Plan:
    """Computes a plan of one engine from the model's configuration and the device's data sheet.

    Args:
        target: the name of a device, see `device_spec`, or its data sheet.
        exact: compile the programs that need the most memory, and use the sizes of temporaries that XLA
            reports. Needs the extra `aot`.

    Raises:
        InvalidArgument: the model or target does not support an option.
        ModelError: the model cannot be read, or is not supported.
    """
    device = device_spec(target) if isinstance(target, str) else target
    if exact:
        check_target(device.target or device.name)
        spec = describe_for(config, device.target)
        # their memory does not depend on the number of pages
        provisional, threads = dataclasses.replace(spec, num_pages=2), sizes(config, "gpu").compile_threads
        keys = largest(spec)
        built = [*compile_all(provisional, keys, threads=threads, progress=progress, options=UNTUNED)]
    else:
        spec, built = described(config, device), []
    programs = {program.key: memory_of(program.program) for program in built} or estimated(spec)
    memory, pages = room(config, spec, device_limit(config, device), programs)
    layout = config.layout
    cluster = Cluster(device, layout.devices, 1, kernels=not config.batch_invariant)
    roofline = Roofline(spec.model, formats_of(spec), cluster, layout)
    if not fits(memory, pages):
        pages = 0
    plan = _plan(spec, memory, pages, roofline)
    return dataclasses.replace(
        plan,
        programs=programs,
        seconds={program.key: program.seconds for program in built},
        fitting=[] if pages else _what_fits(config, device, spec, memory),
    )


def plan_layouts(choice: Choice) -> Plan:
    """The plan of the best of several layouts; without one, of the model on one device, which then does not
    fit."""
    best = choice.best
    if best is None:
        group = choice.group
        roofline = Roofline(group.spec.model, group.formats, choice.cluster)
        return dataclasses.replace(_plan(group.spec, group.memory, 0, roofline), choice=choice)
    pages = max(best.memory.pages, 0)
    return dataclasses.replace(_plan(best.spec, best.memory, pages, best.serving.roofline), choice=choice)


def _plan(spec: ExecutionSpec, memory: DeviceMemory, pages: int, roofline: Roofline) -> Plan:
    table = spec.table
    contexts = sorted({min(context, spec.max_model_len) for context in CONTEXTS})
    batches = sorted({min(batch, spec.max_slots) for batch in (*BATCHES, spec.max_slots)})
    steps = sorted({table.tile_size * tiles for tiles in (1, table.max_tiles, max(1, table.max_tiles // 4))})
    return Plan(
        spec=dataclasses.replace(spec, num_pages=pages),
        roofline=roofline,
        memory=memory,
        pages=pages,
        total_programs=len(program_keys(spec)),
        decode=[
            Rate(n, c, roofline.step(Batch(n, c)), n * spec.most_pages(c) < pages * roofline.layout.data)
            for n in batches
            for c in contexts
        ],
        prefill=[Rate(n, c, roofline.step(Batch(0, 0, n, c))) for n in steps for c in contexts],
        programs=estimated(spec),
        kernels=implementations(spec),
    )


def _what_fits(
    config: EngineConfig, device: DeviceSpec, spec: ExecutionSpec, memory: DeviceMemory
) -> list[Fitting]:
    def free(changed: EngineConfig) -> tuple[int, int]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plan has already shown them
            spec = described(changed, device)
        memory, pages = room(changed, spec, device_limit(changed, device))
        pages = pages if fits(memory, pages) else 0
        return pages * memory.page, max(pages - 1, 0) * spec.page_size

    return what_fits(
        config, free, most_tokens=spec.max_model_len, weights_fit=memory.weights < device.memory * MORE_MEMORY
    )
