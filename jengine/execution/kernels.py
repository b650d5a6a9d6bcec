"""Chooses the attention kernels of a spec's programs. Kernels loop over a sequence's own pages; XLA's attention
on a GPU cannot."""

from __future__ import annotations

from typing import Any

import jax

from jengine.errors import InvalidArgument
from jengine.execution.spec import ExecutionSpec
from jengine.models.cache import paged
from pallas_kernels import dispatch
from pallas_kernels.flashinfer import decode as flashinfer
from pallas_kernels.quantized import is_quantized


def prepare(spec: ExecutionSpec) -> None:
    """Registers the custom calls of these programs with XLA, before they are loaded."""
    weights = jax.tree.leaves(spec.params, is_leaf=is_quantized)
    device, q, k_pages = spec.mesh.devices.flat[0], _queries(spec, 1), _own(spec.cache[0][0][0])
    dispatch.prepare(weights, q, k_pages, device=device)
    windows = [group.window for group in paged(spec.groups)]
    flashinfer.prepare(spec.attention_backend, q, k_pages, windows, spec.model.config.attention_soft_cap, device)


def check_attention_backend(spec: ExecutionSpec) -> None:
    """
    Raises:
        InvalidArgument: the backend that was asked for cannot serve these programs on their devices; says why.
    """
    refused = None
    if spec.attention_backend == "mosaic":
        refused = kernels_refused(spec) if spec.mesh.devices.flat[0].platform != "cpu" else "a CPU has other kernels"
    elif spec.attention_backend == "flashinfer":
        refused = _flashinfer_refused(spec)
    if refused is not None:
        raise InvalidArgument("attention_backend", spec.attention_backend, refused)


def _flashinfer_refused(spec: ExecutionSpec) -> str | None:
    config, device = spec.model.config, spec.mesh.devices.flat[0]
    if config.latent is not None:
        return f"{config.family} has latent attention, and FlashInfer's kernel takes keys and values"
    k, v = map(_own, spec.cache[0][0])
    reasons = (
        dispatch.why_flashinfer_unsupported(_queries(spec, 1), k, v, window=group.window, soft_cap=config.attention_soft_cap, device=device)
        for group in paged(spec.groups)
    )
    return next((reason for reason in reasons if reason is not None), None)


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
