"""Chooses how a CPU's programs multiply: by rule if one form always wins, otherwise measured once and stored
in the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jengine.execution.program_folder import write_private
from jengine.execution.spec import ExecutionSpec, cpu_features
from pallas_kernels.devices import cpu_refused
from pallas_kernels.products.weight import forms_of
from pallas_kernels.products.weights import is_weight, stored


def with_forms(spec: ExecutionSpec, forms: Mapping[str, str]) -> ExecutionSpec:
    return dataclasses.replace(spec, product_forms=forms_of(forms))


def product_forms(spec: ExecutionSpec, root: Path) -> dict[str, str]:
    """The form of each product by `form_key`; empty if the device is not a CPU."""
    if spec.mesh.devices.flat[0].platform != "cpu" or cpu_refused() is not None:
        return {}
    from pallas_kernels.products import choice

    weights = [stored(leaf) for leaf in jax.tree.leaves(spec.params, is_leaf=is_weight)]
    if spec.stacks:
        weights.append(stored(jax.ShapeDtypeStruct((1, 1), spec.model.dtype)))
    formats = {
        weight.format.name: weight.format
        for weight in weights
        if len(weight.shape) > 1 and weight.has_cpu_kernel
    }
    config = spec.model.config
    shape = 2 * config.intermediate_size, config.hidden_size  # of the largest product of a layer
    by_place = not spec.table.batch_invariant
    facts = [*_facts(), shape, *([] if by_place else ["batch_invariant"])]
    file = root / "products" / (hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24] + ".json")
    saved = _kept(file)
    forms = choice.forms(str(spec.model.dtype), [*formats.values()], shape, saved, by_place=by_place)
    if any(key not in saved for key in forms):
        # if it cannot be written, programs cannot be saved either, and that raises a warning
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            forms |= {
                key: form for key, form in _kept(file).items() if key in forms
            }  # of processes that measure at the same time, the first one's result is kept
            write_private(file, json.dumps({**saved, **forms}).encode())
    return forms


def _facts() -> list[Any]:
    """Everything that may affect a measurement."""
    from pallas_kernels.llvm import native, team

    return [
        cpu_features(),
        team.threads(),
        native.SOURCE,
        *(importlib.metadata.version(name) for name in ("jaxlib", "llvmlite")),
    ]


def _kept(file: Path) -> Mapping[str, str]:
    with contextlib.suppress(OSError, ValueError):
        saved = json.loads(file.read_text())
        if isinstance(saved, dict) and all(isinstance(form, str) for form in saved.values()):
            return saved
    return {}
