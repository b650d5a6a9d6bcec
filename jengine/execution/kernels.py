"""Chooses the attention kernels of a spec's programs. Kernels loop over a sequence's own pages; XLA's attention
on a GPU cannot."""

from __future__ import annotations

from typing import Any

import jax

from jengine.execution.spec import ExecutionSpec
from pallas_kernels import dispatch
from pallas_kernels.quantized import is_quantized


def prepare(spec: ExecutionSpec) -> None:
    """Registers the custom calls of these programs with XLA, before they are loaded."""
    weights = jax.tree.leaves(spec.params, is_leaf=is_quantized)
    dispatch.prepare(weights, _queries(spec, 1), _own(spec.cache[0][0][0]), device=spec.mesh.devices.flat[0])


def kernels_refused(spec: ExecutionSpec) -> str | None:
    """The reason why attention kernels cannot serve these programs on their devices, or None if they can."""
    device = spec.mesh.devices.flat[0]
    pages = [*map(_own, spec.cache[0][0])]
    k, v = pages[0], pages[-1]
    row, tile = _queries(spec, 1), _queries(spec, 1, spec.table.tile_size)
    return dispatch.why_decode_unsupported(row, k, v, device=device) or dispatch.why_prefill_unsupported(tile, k, v, device=device)


def _own(pages: Any) -> Any:
    """Shapes of one device's part."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype), pages)


def _queries(spec: ExecutionSpec, *shape: int) -> Any:
    """Queries [*shape, heads, head_dim] of one device."""
    config = spec.model.config
    if config.latent is not None:
        return jax.ShapeDtypeStruct((*shape, config.padded(config.num_heads) // config.shards, config.latent.cached_dim), spec.model.dtype)
    heads = config.num_kv_heads_padded // config.shards * config.group_size_padded
    return jax.ShapeDtypeStruct((*shape, heads, config.head_dim), spec.model.dtype)
