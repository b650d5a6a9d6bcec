"""Which kernels a spec's programs have: those of attention loop over a sequence's own pages, which XLA's form on a GPU cannot."""

from __future__ import annotations

from typing import Any

import jax

from jengine.execution.spec import ExecutionSpec
from pallas_kernels import dispatch
from pallas_kernels.quantized import is_quantized


def prepare(spec: ExecutionSpec) -> None:
    """Make known to XLA what these programs call by name, before they are loaded."""
    weights = jax.tree.leaves(spec.params, is_leaf=is_quantized)
    dispatch.prepare(weights, spec.cache[0][0], device=spec.mesh.devices.flat[0])


def kernels_refused(spec: ExecutionSpec) -> str | None:
    """Why attention's kernels cannot serve these programs on their devices, or None if they can."""
    config, device = spec.model.config, spec.mesh.devices.flat[0]

    def own(array: Any) -> Any:
        return jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)

    k, v = jax.tree.map(own, spec.cache[0])
    heads = config.num_kv_heads_padded // config.shards * config.group_size_padded
    row: Any = jax.ShapeDtypeStruct((1, heads, config.head_dim), spec.model.dtype)
    tile: Any = jax.ShapeDtypeStruct((1, spec.table.tile_size, heads, config.head_dim), spec.model.dtype)
    return dispatch.why_decode_unsupported(row, k, v, device=device) or dispatch.why_prefill_unsupported(tile, k, v, device=device)
