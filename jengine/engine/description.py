"""Describes an engine: completes its options for a model and devices, and derives everything that programs depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jengine.config import EngineConfig
from jengine.devices.cpu_threads import limit_cpu_threads
from jengine.engine.devices import Devices
from jengine.engine.model_source import ModelSource
from jengine.engine.precision import choose_dtype
from jengine.engine.program_set import given_programs
from jengine.engine.shapes import describe
from jengine.execution.cache_folders import saved_page_counts
from jengine.execution.memory import pages_that_fit, pages_to_use
from jengine.execution.prebuilt_programs import PrebuiltPrograms
from jengine.execution.product_forms import product_forms, with_forms
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.link import SingleProcess


def describe_engine(config: EngineConfig) -> tuple[EngineConfig, ExecutionSpec]:
    """The options with a dtype, and everything that programs depend on except the number of pages. Loads and
    compiles nothing.

    Raises the errors of `start_engine`.
    """
    limit_cpu_threads(config.cpu_threads)
    given, config = given_programs(config)
    return spec_of(config, ModelSource.find(config), Devices.take(config, SingleProcess()), given)


def spec_of(
    config: EngineConfig, source: ModelSource, devices: Devices, given: PrebuiltPrograms | None
) -> tuple[EngineConfig, ExecutionSpec]:
    """The same for a model and devices.

    Args:
        given: programs that the user gave.
    """
    device, config = devices.mesh.local_devices[0], source.complete(config)
    dtype: Any = devices.agree(str(jnp.dtype(choose_dtype(config.dtype, source.config, device, devices.root))))
    config = dataclasses.replace(config, dtype=dtype)
    shapes = describe(config, source.config, devices.mesh, devices.root)
    forms = devices.agree(product_forms(shapes, devices.root) if given is None else given.product_forms)
    return config, with_forms(shapes, dict(forms))


def with_pages(config: EngineConfig, spec: ExecutionSpec, devices: Devices) -> ExecutionSpec:
    """The spec with the number of pages that fit on the devices."""
    fit = pages_that_fit(config, spec)
    chosen = config.num_pages is not None or config.kv_cache_memory is not None or devices.platform == "cpu"
    wanted = fit if chosen else pages_to_use(fit, saved_page_counts(devices.root, spec.fingerprint()))
    return dataclasses.replace(spec, num_pages=devices.link.agree(wanted, min))
