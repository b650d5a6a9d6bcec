"""Attention as models call it: one object for each cache group, created while a trunk is traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jengine.execution.batch import AXES, Batch
from jengine.execution.kv_cache import Place, views
from jengine.models.cache import CacheGroup
from jengine.table.program_table import TrunkKey
from pallas_kernels.attention import dispatch
from pallas_kernels.attention import latent as latent_dispatch
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.work_list import WorkList
from pallas_kernels.cache import dispatch as cache_dispatch
from pallas_kernels.cache import xla as cache_xla
from pallas_kernels.cache.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.cache.xla import Queries
from pallas_kernels.elementwise import rotary
from pallas_kernels.elementwise.rotary import Rotation


class TokenAxis:
    """A step's tokens: decode rows, then tiles. Each array is [rows + tiles * tile_size].

    Attributes:
        tokens: token ids.
        positions: positions in their sequences.
        rotary: the positions that rotary embedding takes: these or, with mrope, int32 [3, tokens].
        until: int32 [tiles, tile_size], for models whose images' tokens see each other, see
            `xla.paged_attention_prefill`; otherwise None.
        owner: slots.
        real: False for padding.
    """

    def __init__(self, last: jax.Array, batch: Batch, drafts: jax.Array | None = None) -> None:
        """last, drafts: see SlotState."""
        tiles, tile_size = batch.tile_tokens.shape
        within = jnp.arange(tile_size)
        tile_positions = batch.tile_positions[:, None] + within
        in_slot, last = batch.row_tokens < 0, last[batch.row_slots]
        row_tokens = jnp.where(in_slot, last[:, 0], batch.row_tokens)
        row_positions = jnp.where(in_slot, last[:, 1], batch.row_positions)
        if drafts is not None:
            behind = jnp.where(in_slot, -1 - batch.row_tokens, 0)  # tokens after the slot's last one
            proposed = drafts[batch.row_slots, jnp.maximum(behind - 1, 0)]
            row_tokens = jnp.where(behind > 0, proposed, row_tokens)
            row_positions += behind
        self.tokens = jnp.concatenate([row_tokens, batch.tile_tokens.reshape(-1)])
        self.positions = jnp.concatenate([row_positions, tile_positions.reshape(-1)])
        tile_owner = jnp.broadcast_to(
            batch.tile_slots[:, None], (tiles, tile_size)
        )  # jnp.repeat would add up constants, which XLA folds slowly
        self.owner = jnp.concatenate([batch.row_slots, tile_owner.reshape(-1)])
        self.real = jnp.concatenate([batch.row_slots > 0, (within < batch.tile_lengths[:, None]).reshape(-1)])
        turns = jnp.concatenate([batch.row_turns[:, :AXES], batch.tile_turns.reshape(-1, AXES)])
        self.rotary = self.positions + turns.T if len(turns) else self.positions
        self.until = tile_positions + batch.tile_ahead if batch.tile_ahead.shape[0] else None


class PagedAttention:
    """Writes keys and values (or one array that is both) to pages, and reads them through a block table.

    Args:
        group: the cache group of the layers that call `attend`.
        block_table: int32 [slots, width], of this cache group.
        device: a device that programs are compiled for; it determines the kernels.
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
        batch_invariant: bool = False,
    ) -> None:
        index = jnp.minimum(axis.positions // page_size, block_table.shape[1] - 1)
        # padding writes to the null page
        self._pages = jnp.where(axis.real, block_table[axis.owner, index], 0)
        self._offsets = axis.positions % page_size
        self._row_tables, self._tile_tables = block_table[batch.row_slots], block_table[batch.tile_slots]
        self._row_lengths = jnp.where(batch.row_slots > 0, axis.positions[: key.rows] + 1, 0)
        self._group, self._batch, self._key, self._page_size = group, batch, key, page_size
        self._device, self._batch_invariant = device, batch_invariant
        self._latent, self._until = group.kind == "latent", axis.until
        # Traced and lowered once for all layers with the same static options, part and shapes.
        self._one_layer = jax.jit(self._layer, static_argnames="part")
        # by window: made by the first layer of the group, for all
        self._work: dict[int | None, WorkList | None] = {}

    def attend(
        self,
        qkv: Qkv | QkvProduct | QueriesOnly,
        kv: Place,
        rotation: Rotation | None,
        options: AttentionOptions,
        part: int,
    ) -> tuple[jax.Array, Place]:
        """A layer's results, and its place in the cache with the new keys and values."""
        if options.window not in self._work:
            self._work[options.window] = self._make_work(qkv, kv, options.window)
        out: tuple[jax.Array, Place] = self._one_layer(
            qkv, kv, rotation, options, self._work[options.window], part=part
        )
        return out

    def _layer(
        self,
        qkv: Qkv | QkvProduct | QueriesOnly,
        kv: Place,
        rotation: Rotation | None,
        options: AttentionOptions,
        work: WorkList | None,
        part: int,
    ) -> tuple[jax.Array, Place]:
        (decoding, prompts), cache = self._write(qkv, views(kv, self._group, self._page_size), rotation, part)
        row_tables, tile_tables = (
            self._of_part(self._row_tables, part),
            self._of_part(self._tile_tables, part),
        )
        rank = qkv.v.shape[-1] if self._latent and isinstance(qkv, Qkv) else 0
        key, out = self._key, []
        if key.rows:
            out.append(self._decode(decoding, cache, row_tables, options, work, rank))
        if key.tiles:
            tiles = prompts.reshape(key.tiles, -1, *prompts.shape[1:])
            got = self._prefill(tiles, cache, tile_tables, options, rank)
            out.append(got.reshape(-1, *got.shape[2:]))
        return jnp.concatenate(out), jax.tree.map(lambda new, like: new.reshape(like.shape), cache, kv)

    def _write(
        self, qkv: Qkv | QkvProduct | QueriesOnly, kv: Place, rotation: Rotation | None, part: int
    ) -> tuple[Queries, Place]:
        """Queries of rows and of tiles, and the layer's pages with the new keys and values, if it has any."""
        rows, pages = self._key.rows, self._pages
        if isinstance(qkv, QueriesOnly):
            q = qkv.q if rotation is None else rotary.rotate(qkv.q, rotation, device=self._device)
            return (q[:rows], q[rows:]), kv
        if self._latent:
            assert isinstance(qkv, Qkv) and rotation is None
            queries = qkv.q[:rows], qkv.q[rows:]
            return queries, (cache_xla.page_write(kv[0], qkv.k, self._of_part(pages, part), self._offsets),)
        where = self._of_part(pages, part), self._offsets
        return cache_dispatch.kv_write(
            kv[0], kv[1], qkv, *where, rows=rows, rotation=rotation, device=self._device
        )

    def _decode(
        self,
        q: jax.Array,
        kv: Place,
        tables: jax.Array,
        options: AttentionOptions,
        work: WorkList | None,
        rank: int,
    ) -> jax.Array:
        """Attention of rows; rank: of latent attention."""
        where, pages = (tables, self._row_lengths), self._key.pages
        if self._latent:
            return latent_dispatch.latent_attention_decode(
                q, kv[0], *where, options, rank=rank, most_pages=pages, work=work, device=self._device
            )
        return dispatch.paged_attention_decode(
            q, kv[0], kv[1], *where, options, pages=pages, work=work, device=self._device
        )

    def _prefill(
        self, q: jax.Array, kv: Place, tables: jax.Array, options: AttentionOptions, rank: int
    ) -> jax.Array:
        """Attention of tiles; rank: of latent attention."""
        where, pages = (tables, self._batch.tile_positions, self._batch.tile_lengths), self._key.pages
        if self._latent:
            return latent_dispatch.latent_attention_prefill(
                q, kv[0], *where, options, rank=rank, most_pages=pages, device=self._device
            )
        until = None if options.causal else self._until
        return dispatch.paged_attention_prefill(
            q, kv[0], kv[1], *where, options, pages=pages, until=until, device=self._device
        )

    def _of_part(self, pages: jax.Array, part: int) -> jax.Array:
        """Ids of pages in the view of a layer's part."""
        return pages if self._group.parts == 1 else pages * self._group.parts + part

    def _make_work(
        self, qkv: Qkv | QkvProduct | QueriesOnly, kv: Place, window: int | None
    ) -> WorkList | None:
        if not self._key.rows:
            return None
        lengths, device = self._row_lengths, self._device
        if self._latent:
            work = latent_dispatch.latent_decode_work(qkv.heads, lengths, device=device)
        else:
            tokens, invariant = self._row_tables.shape[1] * self._page_size, self._batch_invariant
            pages = views(kv, self._group, self._page_size)[0]
            work = dispatch.decode_work(
                pages,
                lengths,
                tokens=tokens,
                heads=qkv.heads,
                owners=self._batch.row_slots,
                window=window,
                batch_invariant=invariant,
                device=device,
            )
        return None if work is None else work.shared()
