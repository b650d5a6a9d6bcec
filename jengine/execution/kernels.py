"""The kernels of a spec's programs: which implementation serves each operation, and why not a newer one.

Attention matters most: kernels loop over a sequence's own pages; XLA's attention on a GPU cannot.
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

from jengine.execution.kv_cache import views
from jengine.execution.loras import prepare as prepare_adapters
from jengine.execution.program_folder import touch, write_private
from jengine.execution.spec import ExecutionSpec, cpu_features
from jengine.models.cache import CacheGroup, Queries, paged
from jengine.parallel.mesh import local
from pallas_kernels import registration
from pallas_kernels.attention import dispatch
from pallas_kernels.attention import latent as latent_dispatch
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.dispatch import KV_WRITE, PAGE_COPY
from pallas_kernels.cache.qkv import Qkv
from pallas_kernels.devices import cpu_refused
from pallas_kernels.products.dispatch import explain_product
from pallas_kernels.products.quantize_rows import ROW_QUANTIZATION
from pallas_kernels.products.weight import forms_of
from pallas_kernels.products.weights import is_weight, stored
from pallas_kernels.quantization.quantized import Quantized
from pallas_kernels.targets import XLA, Choice, explain

DECODE, PREFILL = "decode attention", "prefill attention"  # names of operations


def prepare(spec: ExecutionSpec) -> None:
    """Registers the custom calls of these programs with XLA, before they are loaded."""
    weights = jax.tree.leaves(spec.params, is_leaf=is_weight)
    device = spec.mesh.devices.flat[0]
    for group in paged(spec.groups):
        if not group.layers:  # other stages have them
            continue
        q, (k_pages, _) = _queries(spec, group, 1), _pages(spec, group)
        registration.prepare(weights, q, k_pages, ahead=spec.ahead, device=device)
    if spec.adapters is not None:
        prepare_adapters(spec.adapters)
    if spec.drafting is not None:
        prepare(spec.drafting)


def kernels_refused(spec: ExecutionSpec) -> str | None:
    """The reason why attention kernels cannot serve these programs on their devices, or None if they can."""
    return next((choice.why for choice in _attention(spec).values() if choice.name == XLA), None)


def decode_refused(spec: ExecutionSpec) -> str | None:
    """The reason why attention kernels cannot serve rows, or None if they can."""
    choice = _attention(spec).get(DECODE)
    return None if choice is None or choice.name != XLA else choice.why


def implementations(spec: ExecutionSpec) -> dict[str, Choice]:
    """Which implementation serves each operation, and why not the newest one for such devices.

    Forms of products on a CPU are in `spec.product_forms`.
    """
    chosen, device = _attention(spec), spec.mesh.devices.flat[0]
    for group in paged(spec.groups):
        q, pages = _queries(spec, group, 1), _pages(spec, group)
        key: Any = jax.ShapeDtypeStruct((1, *pages[0].shape[1::2]), q.dtype)
        _add(chosen, "KV writes", explain(KV_WRITE, device, *pages, Qkv(q, key, key)))
        _add(chosen, "page copies", explain(PAGE_COPY, device, *pages))
    return chosen if device.platform == "cpu" else chosen | _products(spec, device)


def described(chosen: dict[str, Choice]) -> str:
    """`implementations` in a line."""
    operations: dict[Choice, list[str]] = {}
    for operation, choice in chosen.items():
        operations.setdefault(choice, []).append(operation)
    return "; ".join(
        f"{choice.name}{f' ({choice.why})' if choice.why else ''} for {', '.join(names)}"
        for choice, names in operations.items()
    )


def _attention(spec: ExecutionSpec) -> dict[str, Choice]:
    chosen: dict[str, Choice] = {}
    device = spec.mesh.devices.flat[0]
    for group in paged(spec.groups):
        q, pages, options = _queries(spec, group, 1), _pages(spec, group), _options(group)
        rank, tiles = _facts(group).rank, _queries(spec, group, 1, spec.table.tile_size)
        calls: Any = dispatch.DECODE, dispatch.PREFILL, (*pages, options), (spec.ahead,)
        if rank is not None:
            latent = pages[0], options, rank
            calls = latent_dispatch.LATENT_DECODE, latent_dispatch.LATENT_PREFILL, latent, ()
        decode, prefill, call, ahead = calls
        _add(chosen, DECODE, explain(decode, device, q, *call))
        _add(chosen, PREFILL, explain(prefill, device, tiles, *call, *ahead))
    return chosen


def _products(spec: ExecutionSpec, device: jax.Device) -> dict[str, Choice]:
    """Products on a GPU, by the format of the weights."""
    chosen: dict[str, Choice] = {}
    parameters = jax.tree.leaves(spec.params, is_leaf=is_weight)
    axes = jax.tree.leaves(spec.model.axes, is_leaf=lambda axes: isinstance(axes, tuple))
    for parameter, names in zip(parameters, axes, strict=True):
        if len(parameter.shape) < 2:
            continue
        mine, experts = local(parameter), names[0] == "experts"
        x: Any = jax.ShapeDtypeStruct((1, mine.shape[-1]), spec.model.dtype)
        operation = f"products of {'experts in ' if experts else ''}{stored(mine).format.name}"
        _add(chosen, operation, explain_product(x, mine, grouped=experts, device=device))
        if isinstance(mine, Quantized) and mine.inputs and (mine.by_group or not experts):
            _add(chosen, "row quantization", explain(ROW_QUANTIZATION, device, x))
    return chosen


def _add(chosen: dict[str, Choice], operation: str, choice: Choice) -> None:
    """Notes a choice. The first call of an operation that XLA serves counts: it decides on the programs."""
    if operation not in chosen or (choice.name == XLA != chosen[operation].name):
        chosen[operation] = choice


def _options(group: CacheGroup) -> AttentionOptions:
    """The options that the group's layers use, as far as kernels may refuse them. Arrays are abstract."""
    facts = _facts(group)
    slopes: Any = jax.ShapeDtypeStruct((facts.heads,), "float32") if facts.slopes else None
    return AttentionOptions(1.0, window=group.window, soft_cap=facts.soft_cap, slopes=slopes)


def _pages(spec: ExecutionSpec, group: CacheGroup) -> tuple[Any, Any]:
    """Pages of keys and values of one layer of the group, on one device."""
    seen = jax.eval_shape(lambda place: views(place, group, spec.page_size), local(spec.cache[group.pool][0]))
    return seen[0], seen[-1]


def _queries(spec: ExecutionSpec, group: CacheGroup, *shape: int) -> Any:
    """Queries [*shape, heads, head_dim] of one device, for the layers of a group."""
    return jax.ShapeDtypeStruct((*shape, _facts(group).heads, _facts(group).dim), spec.model.dtype)


def _facts(group: CacheGroup) -> Queries:
    assert group.queries is not None, "only the group of states has no queries"
    return group.queries


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
    facts = [*_form_facts(), shape, *([] if by_place else ["batch_invariant"])]
    file = root / "products" / (hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24] + ".json")
    saved = _kept(file)
    touch(file)
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


def _form_facts() -> list[Any]:
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


AMX, AVX512, AVX2 = "AMX", "AVX-512 and bfloat16 products", "AVX2 only, the slower class of x86"
# by class: features that a processor has, and features that it does not have
CLASSES = {
    AMX: ({"amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni"}, set[str]()),
    AVX512: ({"avx512_bf16", "avx512_vnni"}, {"amx_int8"}),
    AVX2: ({"avx2", "fma"}, {"avx512f", "avx_vnni"}),
}
USES = "for one stream", "for 32 at once", "in prompts"
# tokens/s over bfloat16's, of a model of 134 million parameters: compare_*.json in benchmarks/results
SPEEDS = {
    AMX: {"w8a8": (2.3, 1.3, 1.2), "w4a8": (3.1, 1.0, 1.16)},
    AVX512: {"w8a8": (1.7, 1.5, 1.3), "w4a8": (2.8, 1.3, 1.3)},
    AVX2: {"w8a8": (3.0, 1.2, 1.2), "w4a8": (2.5, 1.6, 1.8)},
}
# over bfloat16's, of a model of 135 million: benchmarks/results/quantization_perplexity.json
PERPLEXITIES = {"w8a8": "1.01", "w4a8": "1.1 with calibration_data, 1.3 without"}


def fastest_formats(spec: ExecutionSpec) -> str:
    """One sentence for unquantized models on a CPU; empty for others, and if the class was not measured."""
    features = set(cpu_features().split())
    name = next(
        (name for name, (has, lacks) in CLASSES.items() if has <= features and not lacks & features), None
    )
    if spec.mesh.devices.flat[0].platform != "cpu" or spec.model.quantized or name is None:
        return ""
    uses = dict[str, list[str]]()
    for index, use in enumerate(USES):
        best = max(SPEEDS[name], key=lambda quantization: SPEEDS[name][quantization][index])
        uses.setdefault(best, []).append(
            f"about {SPEEDS[name][best][index]:g} times bfloat16's tokens/s {use}"
        )
    formats = (
        f"quantization={best!r} ({' and '.join(parts)}; perplexity times {PERPLEXITIES[best]})"
        for best, parts in uses.items()
    )
    return f"processor with {name}; fastest for small models: {', '.join(formats)}"
