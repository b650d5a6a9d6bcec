"""In which form a CPU's programs multiply: by rule where one form is known to win, else measured once and kept in the cache's root."""

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
from pallas_kernels.products import cpu_refused, kind_of
from pallas_kernels.quantized import is_quantized


def with_forms(spec: ExecutionSpec, forms: Mapping[str, str]) -> ExecutionSpec:
    return dataclasses.replace(spec, product_forms=tuple(sorted(forms.items())))


def product_forms(spec: ExecutionSpec, root: Path) -> dict[str, str]:
    """What `pallas_kernels.products.using` takes; empty where the device is no CPU."""
    if spec.mesh.devices.flat[0].platform != "cpu" or cpu_refused() is not None:
        return {}
    from pallas_kernels.cpu import choice

    weights = [leaf for leaf in jax.tree.leaves(spec.params, is_leaf=is_quantized) if len(leaf.shape) > 1]
    kinds = sorted({kind_of(weight) for weight in weights})
    config = spec.model.config
    shape = 2 * config.intermediate_size, config.hidden_size  # of the largest product of a layer
    by_place = not spec.table.batch_invariant
    facts = [*_facts(), shape, *([] if by_place else ["batch_invariant"])]
    file = root / "products" / (hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24] + ".json")
    kept = _kept(file)
    forms = choice.forms(str(spec.model.dtype), kinds, shape, kept, by_place=by_place)
    if any(key not in kept for key in forms):
        with contextlib.suppress(OSError):  # the programs cannot be saved either, and that is warned of
            file.parent.mkdir(parents=True, exist_ok=True)
            forms |= {
                key: form for key, form in _kept(file).items() if key in forms
            }  # of processes that measured at once, the first counts
            write_private(file, json.dumps({**kept, **forms}).encode())
    return forms


def _facts() -> list[Any]:
    """All that may turn a measurement."""
    from pallas_kernels.cpu import native, team

    return [cpu_features(), team.threads(), native.SOURCE, *(importlib.metadata.version(name) for name in ("jaxlib", "llvmlite"))]


def _kept(file: Path) -> Mapping[str, str]:
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(file.read_text())
        if isinstance(kept, dict) and all(isinstance(form, str) for form in kept.values()):
            return kept
    return {}
