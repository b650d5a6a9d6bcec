"""The programs of an engine: first and later ones, who compiles them, and what its steps cost."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from jengine.base.host_memory import available_memory
from jengine.base.progress import Progress
from jengine.core.config import EngineConfig
from jengine.core.scheduling_options import BURST_STEPS
from jengine.devices.device_defaults import sizes
from jengine.engine.loop.engine_parts import RUNS
from jengine.engine.setup.devices import process_root
from jengine.engine.setup.measure import measure
from jengine.execution.background import BackgroundPrograms
from jengine.execution.cache_folders import cache_root, costs_file
from jengine.execution.compile_children import CompileChildren, Job, Target, children_count
from jengine.execution.executor import StagePrograms
from jengine.execution.kinds import Key
from jengine.execution.memory import check_room
from jengine.execution.program_cache import ProgramCache
from jengine.execution.program_folder import make_private, write_private
from jengine.execution.program_store import PrebuiltPrograms
from jengine.execution.programs import (
    Programs,
    by_effort,
    file_name,
    first_keys,
    of_stage,
    open_cache,
    program_keys,
    running,
)
from jengine.execution.runner import Runner
from jengine.execution.spec import ExecutionSpec
from jengine.models import Model
from jengine.parallel.link import Link
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.table.program_table import ProgramTable
from jengine.table.ready_programs import ReadyPrograms

log = logging.getLogger("jengine")


def make_children(
    config: EngineConfig, devices: Sequence[jax.Device], model: Model
) -> CompileChildren | None:
    """Processes that compile for these devices; None: threads of this process do. They do on CPUs, where
    XLA's own work takes most of the time and does not hold Python's lock.
    """
    if devices[0].platform != "gpu" or config.num_processes > 1 or config.programs is not None:
        return None
    target, kind = Target.of(devices), devices[0].device_kind
    count = children_count(sizes(config, "gpu").compile_threads, available_memory())
    if target is None:
        why = "no description to compile for"
    elif not count:
        why = "too little memory of the host"
    elif any(kind.__module__ == "__main__" for kind in model.types):
        why = "__main__ defines the model's family, which other processes cannot import"
    else:
        return CompileChildren(count, target, cache_root(config.cache_dir))
    log.warning("%s: this process compiles, which slows its first requests: %s", kind, why)
    return None


class EarlyCompilation:
    """The processes that compile an engine's programs, and the folder of the cache that they fill.

    Args:
        spec: with the number of pages that the engine will probably have.
    """

    def __init__(
        self, config: EngineConfig, spec: ExecutionSpec, children: CompileChildren, cache: ProgramCache
    ) -> None:
        self.children, self.num_pages = children, spec.num_pages
        self._cache: ProgramCache | None = cache
        if len(spec.stages) > 1 or spec.ranks > 1:  # they have several specs
            self._cache = None
        elif cache.hold():  # otherwise another process compiles them
            keys = first_keys(spec) if config.warm_up == "progressive" else program_keys(spec)
            others = [key for key in program_keys(spec) if key not in keys]
            missing = {*cache.missing(map(file_name, [*keys, *others]))}
            every: list[Key] = [*by_effort(spec, keys), *others]
            self.children.begin(
                Job.of(spec, children.target), [key for key in every if file_name(key) in missing]
            )
        else:
            self._cache = None

    def cache_for(self, spec: ExecutionSpec) -> ProgramCache | None:
        """The folder of this spec, if these processes fill it. If they fill another one, they stop that."""
        if self._cache is not None and spec.num_pages != self.num_pages:
            self.children.forget()
            self._release()
        return self._cache

    def close(self) -> None:
        """Ends the processes. May be called repeatedly."""
        self.children.close()
        self._release()

    def _release(self) -> None:
        if self._cache is not None:
            self._cache.release()
            self._cache = None


class WarmedUp(NamedTuple):
    """Programs that steps may use, the costs of these steps, and a function that saves the costs for the next
    start.

    Attributes:
        used: keys of the programs, which have run unless this is a CPU.
    """

    used: list[Key]
    ready: ReadyPrograms
    costs: StepCosts
    save_costs: Callable[[], None]


class ProgramSet:
    """All programs of a spec. Some are ready at the start, with warm_up="progressive"; the others may follow.

    Args:
        prebuilt: programs that the user gave; None: those of the cache, and others are compiled.
        max_bytes: of the cache.
        only: obtains these programs, all at the start; None: all of the table.
        beside: sets with the others, for steps that run programs of several sets.
        early: compiles in other processes; None: this process does. `close` ends it.

    Attributes:
        keys: of all programs, in the order in which they become ready.

    Raises:
        InvalidArgument: the given programs are for something else.
        OutOfMemory: the device has no room for the given programs.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ExecutionSpec,
        prebuilt: PrebuiltPrograms | None,
        max_bytes: int,
        progress: Progress,
        *,
        only: Sequence[Key] | None = None,
        beside: Sequence[ProgramSet] = (),
        early: EarlyCompilation | None = None,
    ) -> None:
        self._root, self._early = process_root(config), early
        self.keys = program_keys(spec)
        if only is None and config.warm_up == "progressive" and prebuilt is None:
            only = first_keys(spec)
        stages = [
            Programs(
                stage,
                prebuilt
                or (early and early.cache_for(stage))
                or open_cache(stage, self._root, max_bytes, wait=config.num_processes == 1),
                threads=sizes(config, spec.mesh.devices.flat[0].platform).compile_threads,
                progress=progress,
                first=None if only is None else of_stage(stage, only),
                children=None if early is None else early.children,
            )
            for stage in spec.local_stages
        ]
        self.programs = StagePrograms(stages, only or self.keys) if spec.pipeline else stages[0]
        self.compiled: int = self.programs.compiled + sum(part.compiled for part in beside)  # at the start
        self.loaded: int = self.programs.loaded + sum(part.loaded for part in beside)
        self._sets = [self.programs, *(part.programs for part in beside)]
        if prebuilt is not None:
            check_room(spec, running(self.programs.memory))

    def obtain_others(self, link: Link) -> BackgroundPrograms | None:
        """Obtains the programs that are not ready yet, in the background. None: all are."""
        if all(map(self._has, self.keys)):
            self.close()
            return None
        if self._early is not None:
            self._early.children.step_aside()
        return BackgroundPrograms(self.programs, self.keys, link, ended=self.close)

    def close(self) -> None:
        """Ends the processes that compile. May be called repeatedly."""
        if self._early is not None:
            self._early.close()

    def _has(self, key: Key) -> bool:
        return any(key in programs for programs in self._sets)

    def warm_up(self, runner: Runner, progress: Progress) -> WarmedUp:
        """Runs programs that were compiled, and measures steps whose cost is not known. Otherwise, checks
        that programs run; on a GPU, all of them, since their first runs take long.
        """
        spec = runner.spec
        used = [key for key in self.keys if self._has(key)]
        ready = ReadyPrograms(spec.table, [key for key in used if not isinstance(key, str)])
        saved = CostsFile(self._root, spec.fingerprint())
        costs = saved.load(spec.table) or StepCosts(spec.table)
        unmeasured = any(key not in costs.known for key in ready.trunks()) or (
            spec.host_pages and costs.swaps is None
        )
        if self.compiled or unmeasured:
            measured = measure(runner, ready, costs, progress=progress)
            runner.warm_up(ready, progress=progress, ran=measured, times=1 if runner.on_host else RUNS)
            saved.save(costs)
        elif not runner.on_host:
            runner.warm_up(ready, progress=progress, times=RUNS)
        else:
            runner.check(ready)
        return WarmedUp(used, ready, costs, partial(saved.update, costs))


def given_programs(config: EngineConfig) -> tuple[PrebuiltPrograms | None, EngineConfig]:
    """The programs that an option names, and options completed with what they were compiled for.

    Raises:
        InvalidArgument: the folder cannot be read or is not trusted.
    """
    if config.programs is None:
        return None, config
    prebuilt = PrebuiltPrograms(Path(config.programs))
    return prebuilt, prebuilt.complete(config)


def saved_costs(config: EngineConfig, spec: ExecutionSpec) -> StepCosts | None:
    """Step costs that engines with these options have measured on this machine; None if there are none.
    config, spec: as returned by `describe_engine`. An LLM has bursts by default and a server has none: costs
    of either serve both.
    """
    table, root = spec.table, process_root(config)
    for steps in (table.steps, BURST_STEPS if table.steps == 1 else 1):
        measured = dataclasses.replace(spec, table=dataclasses.replace(table, steps=steps))
        costs = CostsFile(root, measured.fingerprint()).load(measured.table)
        if costs is not None:
            return costs if measured.table == table else costs.for_table(table)
    return None


class CostsFile:
    """A file of costs, written atomically. If several engines run, the last writer wins.

    Args:
        root: the cache's root folder.
        fingerprint: ExecutionSpec.fingerprint() of the programs.
    """

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.file = costs_file(root, fingerprint)
        self._saved = b""

    def load(self, table: ProgramTable) -> StepCosts | None:
        """None if there are no readable costs of this table."""
        with contextlib.suppress(OSError, ValueError):
            data = self.file.read_bytes()
            costs = StepCosts.from_json(data)
            if costs.table == table:
                self._saved = data
                return costs
        return None

    def save(self, costs: StepCosts) -> None:
        """Saves costs if they have changed. A write error is logged; the next start then measures again."""
        data = costs.under_usual_load().to_json()
        if data == self._saved:
            return
        try:
            make_private(self.file.parent)
            write_private(self.file, data)
            self._saved = data
        except OSError as error:
            log.warning("step costs could not be saved: %s", error)

    def update(self, costs: StepCosts) -> None:
        """Saves what an engine has learned, unless the cache has been removed or cleared since it started."""
        if self.file.exists() and costs.measured:
            self.save(costs)
