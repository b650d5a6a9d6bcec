"""Chooses the attention kernels of a spec's programs. Kernels loop over a sequence's own pages; XLA's
attention on a GPU cannot.
"""

from __future__ import annotations

from typing import Any

import jax

from jengine.execution.adapters import prepare as prepare_adapters
from jengine.execution.kv_cache import views
from jengine.execution.spec import ExecutionSpec
from jengine.models.cache import CacheGroup, Queries, paged
from pallas_kernels import registration
from pallas_kernels.attention import dispatch
from pallas_kernels.attention import latent as latent_dispatch
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.products.weights import is_weight


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
    device = spec.mesh.devices.flat[0]

    def refused(group: CacheGroup) -> str | None:
        q = _queries(spec, group, 1, spec.table.tile_size)
        how: Any = {"ahead": spec.ahead, "device": device}
        return dispatch.why_prefill_unsupported(q, *_pages(spec, group), _options(group), **how)

    return decode_refused(spec) or next(filter(None, map(refused, paged(spec.groups))), None)


def decode_refused(spec: ExecutionSpec) -> str | None:
    """The reason why attention kernels cannot serve rows, or None if they can."""
    device = spec.mesh.devices.flat[0]
    for group in paged(spec.groups):
        q, pages, options = _queries(spec, group, 1), _pages(spec, group), _options(group)
        if (rank := _facts(group).rank) is not None:
            refused = latent_dispatch.why_latent_decode_unsupported(
                q, pages[0], options, rank=rank, device=device
            )
        else:
            refused = dispatch.why_decode_unsupported(q, *pages, options, device=device)
        if refused is not None:
            return refused
    return None


def _options(group: CacheGroup) -> AttentionOptions:
    """The options that the group's layers use, as far as kernels may refuse them. Arrays are abstract."""
    facts = _facts(group)
    slopes: Any = jax.ShapeDtypeStruct((facts.heads,), "float32") if facts.slopes else None
    return AttentionOptions(1.0, window=group.window, soft_cap=facts.soft_cap, slopes=slopes)


def _pages(spec: ExecutionSpec, group: CacheGroup) -> tuple[Any, Any]:
    """Pages of keys and values of one layer of the group, on one device."""
    seen = jax.eval_shape(
        lambda place: views(place, group, spec.page_size), tuple(map(_own, spec.cache[group.pool][0]))
    )
    return seen[0], seen[-1]


def _own(pages: Any) -> Any:
    """Shapes of one device's part."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype), pages
    )


def _queries(spec: ExecutionSpec, group: CacheGroup, *shape: int) -> Any:
    """Queries [*shape, heads, head_dim] of one device, for the layers of a group."""
    return jax.ShapeDtypeStruct((*shape, _facts(group).heads, _facts(group).dim), spec.model.dtype)


def _facts(group: CacheGroup) -> Queries:
    assert group.queries is not None, "only the group of states has no queries"
    return group.queries
