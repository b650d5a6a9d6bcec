"""Attention as models call it: one object for each cache group, created while a trunk is traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jengine.core.config import AttentionBackend
from jengine.execution.batch import Batch
from jengine.execution.kv_cache import Place, views
from jengine.models.cache import CacheGroup
from jengine.table.program_table import TrunkKey
from pallas_kernels import dispatch, latent_dispatch, xla
from pallas_kernels.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.work_list import WorkList
from pallas_kernels.xla import Rotation


class TokenAxis:
    """A step's tokens: decode rows, then tiles. Each array is [rows + tiles * tile_size].

    Attributes:
        tokens: token ids.
        positions: positions in their sequences.
        owner: slots.
        real: False for padding.
    """

    def __init__(self, last: jax.Array, batch: Batch) -> None:
        """last: see SlotState."""
        tiles, tile_size = batch.tile_tokens.shape
        within = jnp.arange(tile_size)
        tile_positions = batch.tile_positions[:, None] + within
        in_slot, last = batch.row_tokens < 0, last[batch.row_slots]
        row_tokens = jnp.where(in_slot, last[:, 0], batch.row_tokens)
        row_positions = jnp.where(in_slot, last[:, 1], batch.row_positions)
        self.tokens = jnp.concatenate([row_tokens, batch.tile_tokens.reshape(-1)])
        self.positions = jnp.concatenate([row_positions, tile_positions.reshape(-1)])
        tile_owner = jnp.broadcast_to(
            batch.tile_slots[:, None], (tiles, tile_size)
        )  # jnp.repeat would add up constants, which XLA folds slowly
        self.owner = jnp.concatenate([batch.row_slots, tile_owner.reshape(-1)])
        self.real = jnp.concatenate([batch.row_slots > 0, (within < batch.tile_lengths[:, None]).reshape(-1)])


class PagedAttention:
    """Writes keys and values (or one array that is both) to pages, and reads them through a block table.

    Args:
        group: the cache group of the layers that call `attend`.
        block_table: int32 [slots, width], of this cache group.
        device: a device that programs are compiled for; it determines the kernels.
        backend: implementation of decode attention, see `EngineConfig`.
        batch_invariant: decode attention cuts sequences at fixed places, so a row's result does not depend on
            other rows.
    """

    def __init__(
        self,
        group: CacheGroup,
        block_table: jax.Array,
        batch: Batch,
        axis: TokenAxis,
        key: TrunkKey,
        page_size: int,
        device: jax.Device,
        backend: AttentionBackend = "auto",
        batch_invariant: bool = False,
    ) -> None:
        index = jnp.minimum(axis.positions // page_size, block_table.shape[1] - 1)
        pages = jnp.where(axis.real, block_table[axis.owner, index], 0)  # padding writes to the null page
        offsets = axis.positions % page_size
        row_tables, tile_tables = block_table[batch.row_slots], block_table[batch.tile_slots]
        row_lengths = jnp.where(batch.row_slots > 0, axis.positions[: key.rows] + 1, 0)
        latent = group.kind == "latent"

        # Traced and lowered once for all layers with the same arguments.
        @partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "part"))
        def attend(
            qkv: Qkv | QkvProduct | QueriesOnly,
            kv: Place,
            rotation: Rotation | None,
            sinks: jax.Array | None,
            slopes: jax.Array | None,
            work: WorkList | None,
            part: int,
            **options: Any,
        ) -> tuple[jax.Array, Place]:
            own = views(kv, group, page_size)
            if isinstance(qkv, QueriesOnly):
                q = qkv.q if rotation is None else dispatch.rotate(qkv.q, rotation, device=device)
                decoding, prompts = q[: key.rows], q[key.rows :]
            elif latent:
                assert isinstance(qkv, Qkv) and rotation is None and sinks is None and slopes is None
                decoding, prompts = qkv.q[: key.rows], qkv.q[key.rows :]
                own = (xla.page_write(own[0], qkv.k, of_part(pages, part), offsets),)
            else:
                (decoding, prompts), own = dispatch.kv_write(
                    own[0],
                    own[1],
                    qkv,
                    of_part(pages, part),
                    offsets,
                    rows=key.rows,
                    rotation=rotation,
                    device=device,
                )
            tables, tile = of_part(row_tables, part), of_part(tile_tables, part)
            if latent:
                assert isinstance(qkv, Qkv)
                how: dict[str, Any] = {
                    "rank": qkv.v.shape[-1],
                    "scale": options["scale"],
                    "most_pages": key.pages,
                    "device": device,
                }
            else:
                how = {**options, "sinks": sinks, "slopes": slopes, "pages": key.pages, "device": device}
            decode, prefill = _functions(latent)
            out = []
            if key.rows:
                out.append(decode(decoding, *own, tables, row_lengths, work=work, impl=backend, **how))
            if key.tiles:
                tiles = prompts.reshape(key.tiles, -1, *prompts.shape[1:])
                got = prefill(tiles, *own, tile, batch.tile_positions, batch.tile_lengths, **how)
                out.append(got.reshape(-1, *got.shape[2:]))
            return jnp.concatenate(out), jax.tree.map(lambda new, like: new.reshape(like.shape), own, kv)

        def of_part(pages: jax.Array, part: int) -> jax.Array:
            """Ids of pages in the view of a layer's part."""
            return pages if group.parts == 1 else pages * group.parts + part

        def make_work(qkv: Qkv | QkvProduct | QueriesOnly, kv: Place, window: int | None) -> WorkList | None:
            if not key.rows:
                return None
            if latent:
                assert isinstance(qkv, Qkv)
                work = latent_dispatch.latent_decode_work(qkv.q.shape[1], row_lengths, device=device)
                return None if work is None else work.shared()
            how: dict[str, Any] = {"window": window, "batch_invariant": batch_invariant, "device": device}
            pages = views(kv, group, page_size)[0]
            work = dispatch.decode_work(pages, row_lengths, tokens=block_table.shape[1] * page_size, **how)
            return None if work is None else work.shared()

        self._attend, self._make_work = attend, make_work
        # by window: made by the first layer of the group, for all
        self._work: dict[int | None, WorkList | None] = {}

    def attend(
        self,
        qkv: Qkv | QkvProduct | QueriesOnly,
        kv: Place,
        rotation: Rotation | None,
        sinks: jax.Array | None,
        slopes: jax.Array | None,
        *,
        window: int | None,
        **options: Any,
    ) -> tuple[jax.Array, Place]:
        """A layer's results, and its place in the cache with the new keys and values."""
        if window not in self._work:
            self._work[window] = self._make_work(qkv, kv, window)
        out: tuple[jax.Array, Place] = self._attend(
            qkv, kv, rotation, sinks, slopes, self._work[window], window=window, **options
        )
        return out


def _functions(latent: bool) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Attention of rows and of tiles."""
    if latent:
        return latent_dispatch.latent_attention_decode, latent_dispatch.latent_attention_prefill
    return dispatch.paged_attention_decode, dispatch.paged_attention_prefill
