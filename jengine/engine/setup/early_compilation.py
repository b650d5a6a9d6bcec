"""Compiles an engine's programs in other processes, which begin while this one reads the weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax

from jengine.base.host_memory import available_memory
from jengine.core.config import EngineConfig
from jengine.devices.device_defaults import sizes
from jengine.execution.cache_folders import cache_root
from jengine.execution.compile_children import CompileChildren, Job, Target, children_count
from jengine.execution.kinds import Key
from jengine.execution.program_cache import ProgramCache
from jengine.execution.programs import by_effort, file_name, first_keys, program_keys
from jengine.execution.spec import ExecutionSpec
from jengine.models import Model

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
