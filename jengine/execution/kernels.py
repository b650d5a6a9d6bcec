"""Whether trunks attend with kernels, which loop over a sequence's own pages, or with XLA's form, which on a GPU cannot."""

from __future__ import annotations

from typing import Any

import jax

from jengine.execution.spec import ExecutionSpec
from pallas_kernels import dispatch


def kernels_refused(spec: ExecutionSpec) -> str | None:
    """Why attention's kernels cannot serve these programs on their devices, or None if they can."""
    config, device = spec.model.config, spec.mesh.devices.flat[0]

    def own(array: Any) -> Any:
        return jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)

    k, v = jax.tree.map(own, spec.cache[0])
    heads = config.laid_kv_heads // config.shards * config.laid_group
    row: Any = jax.ShapeDtypeStruct((1, heads, config.head_dim), spec.model.dtype)
    tile: Any = jax.ShapeDtypeStruct((1, spec.table.tile_size, heads, config.head_dim), spec.model.dtype)
    return dispatch.decode_supported(row, k, v, device=device) or dispatch.prefill_supported(tile, k, v, device=device)
