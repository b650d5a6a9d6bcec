"""The body of the Hopper kernel for prefill attention; see `prefill.py`.

Each compute warpgroup folds blocks of keys into an online softmax (Milakov and Gimelshein, 2018; Dao et al.,
2022). The two alternate: one uses the tensor cores while the other computes exponentials. If registers
suffice (`prefill_form`), each also starts the scores of a block before the product with the previous block's
values, which then overlaps the exponentials (Shah et al., FlashAttention-3, 2024). A tile reads keys from the
start of the window to the tile's last real token. Masks are applied only to blocks that are partly visible to
some row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.prefill_feed import Blocks, Ring, feed
from pallas_kernels.attention.hopper.prefill_form import Form
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.softmax import MASKED, SMALLEST, scores, weight_factor
from pallas_kernels.attention.walk import Walk
from pallas_kernels.mosaic.hopper import accumulate, per_row, product, product_then_accumulate
from pallas_kernels.mosaic.refs import Refs


@dataclass(frozen=True)
class WarpgroupItem:
    """A warpgroup's part of an item: rows of a tile and a kv head, and the blocks of keys that they attend
    to.

    Attributes:
        tile, kv_head, row: the tile's index, the kv head, and the first row.
        position: that of the tile's first token.
        end: that behind the last key which a real token sees.
        first: position of the first visible key.
        start, count: the first block of keys, and the number of blocks.
    """

    tile: jax.Array
    kv_head: jax.Array
    row: jax.Array
    position: jax.Array
    end: jax.Array
    first: jax.Array
    start: jax.Array
    count: jax.Array


class Inputs(NamedTuple):
    """In global memory.

    Attributes:
        q: [tiles, tile, heads, head_dim].
        tables: int32 [tiles, width].
        tiles: int32 [3, tiles], from `longest_first`; a length is the number of keys from the tile's position
            on that its tokens see.
        sinks: float32 [kv_heads, rows], one for each (head, token) pair, times log2(e); None: no sinks.
        until: int32 [tiles, rows], the last key that each (head, token) pair sees; None: the token's own.
        k, v: [num_pages, kv_heads, page_size, head_dim].
        k_scale, v_scale: float32 [num_pages, kv_heads, page_size], of an eight-bit cache; else None.
    """

    q: Any
    tables: Any
    tiles: Any
    sinks: Any
    until: Any
    k: Any
    v: Any
    k_scale: Any = None
    v_scale: Any = None


class Outputs(NamedTuple):
    out: Any  # [tiles, tile, heads, head_dim], in global memory


class Scratch(NamedTuple):
    """In shared memory.

    Attributes:
        k, v: keys and values in flight.
        out: [warpgroups, rows, columns], results on their way.
        p: [warpgroups, rows, block_k], weights, if the second product reads them from shared memory; else
            None.
        q_full: barriers of queries, one for each warpgroup.
        q: [warpgroups, rows, head_dim].
        turn: the barrier at which two compute warpgroups alternate; None if they do not.
        tensor: tensor memory and its barriers, see `attention.blackwell`.
    """

    k: Ring
    out: Any
    p: Any
    q_full: Any
    q: Any
    turn: Any
    v: Ring
    tensor: Any = None


@dataclass(frozen=True)
class PrefillCall:
    """What is fixed when the kernel is compiled.

    Attributes:
        walk: the items of each block.
        form: use of registers and shared memory.
        options: without arrays.
    """

    walk: Walk
    form: Form
    options: AttentionOptions


@dataclass(frozen=True)
class Warpgroup:
    """A warpgroup of a thread block.

    Attributes:
        layout: of scores in registers.
    """

    layout: ClassVar[Any] = plgpu.Layout.WGMMA
    inputs: Inputs
    out: Any
    scratch: Scratch
    call: PrefillCall
    block: jax.Array
    warpgroup: jax.Array

    @classmethod
    def run(cls, refs: Refs[Inputs, Outputs, Scratch], call: PrefillCall) -> None:
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        mine = cls(refs.inputs, refs.outputs.out, refs.scratch, call, block, warpgroup)
        pl.when(warpgroup < call.form.warpgroups)(mine.compute)
        pl.when(warpgroup == call.form.warpgroups)(mine.memory)

    @property
    def _tile(self) -> int:
        """Queries of a tile."""
        tile: int = self.inputs.q.shape[1]
        return tile

    @property
    def _group(self) -> int:
        """Query heads per kv head."""
        group: int = self.inputs.q.shape[2] // self.inputs.k.shape[1]
        return group

    @property
    def _rows(self) -> int:
        """(head, token) pairs of a kv head."""
        return self._group * self._tile

    @property
    def _piece(self) -> int:
        """Rows of one head per copy."""
        return math.gcd(self._tile, self.call.form.rows)

    def compute(self) -> None:
        """Attends from the warpgroup's rows of the block's items."""
        call, rows = self.call, self._rows
        if call.form.warpgroups == 2:
            plgpu.set_max_registers(call.form.registers[0], action="increase")
        self._fetch_queries(jnp.int32(0))
        pl.when(self.warpgroup == 1)(self._take_turn)

        def step(number: jax.Array, done: jax.Array) -> jax.Array:
            item = self._item_at(number)
            pl.when(item.row < rows)(partial(self._attend, number, item, done))
            if -(-rows // call.form.rows) % call.form.warpgroups:
                pl.when(item.row >= rows)(partial(self._idle, number, item, done))
            return done + item.count

        lax.fori_loop(0, call.walk.rounds(self.block), step, jnp.int32(0))
        pl.when(self.warpgroup == 0)(self._take_turn)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def memory(self) -> None:
        """Copies the keys and values of the block's items."""
        inputs, call = self.inputs, self.call
        if call.form.warpgroups == 2:
            plgpu.set_max_registers(call.form.registers[1], action="decrease")

        def blocks_at(number: jax.Array) -> Blocks:
            item = self._item_at(number)

            def page(token: jax.Array) -> Any:
                return inputs.tables[item.tile, lax.div(jnp.minimum(token, item.end - 1), inputs.k.shape[2])]

            return Blocks(item.start, item.count, item.first, item.end, page, item.kv_head)

        pages = inputs.k, inputs.v, inputs.k_scale, inputs.v_scale
        feed(call.walk.rounds(self.block), blocks_at, self.scratch.k, self.scratch.v, *pages)

    def _item_at(self, number: jax.Array) -> WarpgroupItem:
        """The n-th item of the block."""
        form, window, kv_heads = self.call.form, self.call.options.window, self.inputs.k.shape[1]
        item = self.call.walk.item(self.block, number)
        head = lax.rem(lax.div(item, form.shares), kv_heads)
        index, position, length = (
            self.inputs.tiles[what, lax.div(item, form.shares * kv_heads)] for what in range(3)
        )
        end = position + length
        first = jnp.int32(0) if window is None else jnp.maximum(position - window + 1, 0)
        start = lax.div(first, form.block_k)
        count = jnp.where(length > 0, lax.div(end + form.block_k - 1, form.block_k) - start, 0)
        row = (lax.rem(item, form.shares) * form.warpgroups + self.warpgroup) * form.rows
        return WarpgroupItem(index, head, row, position, end, first, start, count)

    def _slot_of(self, number: jax.Array) -> jax.Array:
        """The stage of a block of keys, given its number in the thread block."""
        # With one stage, a constant 0 would make the compiler keep the address of each scale in a register.
        stages = self.call.form.stages
        return lax.rem(number, stages) if stages > 1 else lax.shift_right_logical(number, 31)

    def _take_turn(self) -> None:
        if (turn := self.scratch.turn) is not None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    def _place(self, ref: Any, item: WarpgroupItem, at: int) -> Any:
        """The part of queries or results that begins `at` rows after the item's first."""
        tile, piece = self._tile, self._piece
        # rows beyond the last read a valid place, and are not written
        of = jnp.minimum(item.row + at, self._rows - piece)
        return ref.at[
            item.tile, pl.ds(lax.rem(of, tile), piece), item.kv_head * self._group + lax.div(of, tile)
        ]

    def _fetch_queries(self, number: jax.Array) -> None:
        """Starts the copy of an item's queries."""
        mine, full, piece = self.scratch.q.at[self.warpgroup], self.scratch.q_full, self._piece

        @pl.when(number < self.call.walk.rounds(self.block))
        def _() -> None:
            item = self._item_at(number)

            @pl.when((item.count > 0) & (item.row < self._rows))
            def _() -> None:
                for at in range(0, self.call.form.rows, piece):
                    source = self._place(self.inputs.q, item, at)
                    plgpu.copy_gmem_to_smem(source, mine.at[pl.ds(at, piece)], full.at[self.warpgroup])

    def _attend(self, number: jax.Array, item: WarpgroupItem, done: jax.Array) -> None:
        """Processes an item, given the number of blocks of keys before it, and fetches the next item's
        queries.
        """
        form, rows, piece = self.call.form, self._rows, self._piece
        columns_of = self._result(number, item, done)
        staged = self.scratch.out.at[self.warpgroup]
        for column in range(0, self.inputs.q.shape[3], form.columns):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._stage(staged, columns_of(column))
            plgpu.commit_smem()
            for at in range(0, form.rows, piece):
                to = self._place(self.out, item, at).at[:, pl.ds(column, form.columns)]
                pl.when(item.row + at < rows)(
                    partial(plgpu.copy_smem_to_gmem, staged.at[pl.ds(at, piece)], to)
                )
        pl.when(item.count > 0)(self._take_turn)

    def _stage(self, staged: Any, result: jax.Array) -> None:
        """Writes columns of a result to shared memory."""
        staged[...] = result

    def _result(self, number: jax.Array, item: WarpgroupItem, done: jax.Array) -> Callable[[int], jax.Array]:
        """A function that returns columns of an item's result [rows, head_dim], from a first one on."""
        form, (*_, head_dim), dtype = self.call.form, self.inputs.q.shape, self.inputs.q.dtype

        def none() -> Any:
            return plgpu.layout_cast(jnp.zeros((form.rows, head_dim), dtype), self.layout)

        result = lax.cond(item.count > 0, partial(self._folded, number, item, done), none)
        return lambda column: result[:, column : column + form.columns]

    def _folded(self, number: jax.Array, item: WarpgroupItem, done: jax.Array) -> jax.Array:
        scratch, dtype = self.scratch, self.inputs.q.dtype
        k, v = scratch.k, scratch.v

        def then_fetch() -> None:
            self._take_turn()
            self._fetch_queries(number + 1)

        plgpu.barrier_wait(scratch.q_full.at[self.warpgroup])
        slot = self._slot_of(done)
        plgpu.barrier_wait(k.full.at[slot])
        s = product(scratch.q.at[self.warpgroup], k.smem.at[slot].transpose((1, 0)), self._take_turn)
        m, total, weights, _ = self._weigh(item, done, jnp.int32(0), per_row(MASKED), per_row(0.0), s)
        self._take_turn()
        zeros = jnp.zeros((self.call.form.rows, self.inputs.q.shape[3]), jnp.float32)
        zeros = plgpu.layout_cast(zeros, self.layout)
        start = m, total, weights, zeros
        m, total, weights, acc = lax.fori_loop(1, item.count, partial(self._fold, item, done), start)
        last = self._slot_of(done + item.count - 1)
        acc = accumulate(acc, self._operand(weights), v.smem.at[last], then_fetch)
        plgpu.barrier_arrive(v.free.at[last])
        if self.inputs.sinks is not None:
            total += jnp.exp2(self._sinks(item) - m)
        inverse = 1.0 / self._enlarged / jnp.maximum(total, SMALLEST)
        result: jax.Array = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(dtype)
        return result

    @property
    def _enlarged(self) -> float:
        return weight_factor(self.inputs.q.dtype, scaled=self.scratch.v.scale is not None)

    def _sinks(self, item: WarpgroupItem) -> jax.Array:
        """float32 [rows], see `Inputs`."""
        of_rows = self.inputs.sinks.at[item.kv_head, pl.ds(item.row, self.call.form.rows)]
        sinks: jax.Array = plgpu.load(of_rows, layout=self.layout.reduce(1), optimized=False)
        return sinks

    def _fold(self, item: WarpgroupItem, done: jax.Array, i: jax.Array, carry: Any) -> Any:
        """Adds the values of the block of keys before the i-th, and folds the scores of the i-th into the
        softmax.
        """
        m, total, weights, acc = carry
        k, v, mine = self.scratch.k, self.scratch.v, self.scratch.q.at[self.warpgroup]
        slot, last = self._slot_of(done + i), self._slot_of(done + i - 1)
        keys, values = k.smem.at[slot].transpose((1, 0)), v.smem.at[last]
        plgpu.barrier_wait(k.full.at[slot])
        weigh = partial(self._weigh, item, done, i, m, total)
        if self.call.form.overlap:
            like, operand = (m, total, weights, m), self._operand(weights)
            both = product_then_accumulate(mine, keys, acc, operand, values, self._take_turn, weigh, like)
            (m, total, new, alpha), acc = both
            plgpu.barrier_arrive(v.free.at[last])
        else:
            acc = accumulate(acc, self._operand(weights), values)
            plgpu.barrier_arrive(v.free.at[last])
            m, total, new, alpha = weigh(product(mine, keys, self._take_turn))
        acc = lax.optimization_barrier(acc * lax.broadcast_in_dim(alpha, acc.shape, [0]))
        self._take_turn()
        return m, total, new, acc

    def _weigh(
        self, item: WarpgroupItem, done: jax.Array, i: jax.Array, m: jax.Array, total: jax.Array, s: jax.Array
    ) -> Any:
        """Folds a block of scores into the softmax. Returns its new state, the block's weights, and the
        factor of earlier sums.
        """
        (k, v), options, block_k = (self.scratch.k, self.scratch.v), self.call.options, self.call.form.block_k
        slot = self._slot_of(done + i)
        token = (item.start + i) * block_k
        if k.scale is not None:
            s = s * self._along_columns(k.scale.at[slot])
        plgpu.barrier_arrive(k.free.at[slot])
        s, factor = scores(s, options)
        every, window = token + block_k - 1 <= item.position, options.window
        inside = None if window is None else token > item.end - 1 - window
        if self.inputs.until is not None:  # one after the other, which needs fewer registers
            s = lax.cond(every, lambda s: s, partial(self._until, item, token), s)
            if inside is not None:
                s = lax.cond(inside, lambda s: s, partial(self._masked, item, token), s)
        else:
            whole = every if inside is None else every & inside
            s = lax.cond(whole, lambda s: s, partial(self._masked, item, token), s)
        m_new = jnp.maximum(m, s.max(axis=1) * factor)
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s * factor - lax.broadcast_in_dim(m_new, s.shape, [0]))
        total = total * alpha + p.sum(axis=1)
        plgpu.barrier_wait(v.full.at[slot])
        weights = p if v.scale is None else p * (self._along_columns(v.scale.at[slot]) * self._enlarged)
        return m_new, total, weights.astype(self.inputs.q.dtype), alpha

    def _masked(self, item: WarpgroupItem, token: jax.Array, s: jax.Array) -> jax.Array:
        """Scores of the block of keys that begins at a token, without those that a row does not see; only of
        the window, if `_until` has the others.
        """
        window = self.call.options.window
        at = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=self.layout) + item.row
        at = item.position + lax.rem(at, self._tile)
        tokens = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=self.layout) + token
        if self.inputs.until is not None:
            assert window is not None
            return jnp.where(tokens > at - window, s, -jnp.inf)
        seen = tokens <= jnp.minimum(at, item.end - 1)
        return jnp.where(seen if window is None else seen & (tokens > at - window), s, -jnp.inf)

    def _until(self, item: WarpgroupItem, token: jax.Array, s: jax.Array) -> jax.Array:
        """Masks scores of keys behind the last one that a row sees."""
        of_rows = self.inputs.until.at[item.tile, pl.ds(item.row, self.call.form.rows)]
        last = plgpu.load(of_rows, layout=self.layout.reduce(1), optimized=False)
        tokens = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=self.layout) + token
        return jnp.where(tokens <= lax.broadcast_in_dim(last, s.shape, [0]), s, -jnp.inf)

    def _operand(self, weights: jax.Array) -> Any:
        """The left operand of the second product."""
        if self.scratch.p is None:
            return weights
        self.scratch.p[self.warpgroup] = weights
        plgpu.commit_smem()
        return self.scratch.p.at[self.warpgroup]

    def _idle(self, number: jax.Array, item: WarpgroupItem, done: jax.Array) -> None:
        """Keeps the barriers going for the other warpgroup, if this one has no rows: in the last of an odd
        number of 64-row units.
        """
        self._fetch_queries(number + 1)

        @pl.loop(0, item.count)
        def _(i: jax.Array) -> None:
            slot = self._slot_of(done + i)
            for neighbours in (self.scratch.k, self.scratch.v):
                plgpu.barrier_wait(neighbours.full.at[slot])
                plgpu.barrier_arrive(neighbours.free.at[slot])
                self._take_turn()

        @pl.when(item.count > 0)
        def last() -> None:
            self._take_turn()
            self._take_turn()

    def _along_columns(self, x: Any) -> jax.Array:
        """Broadcasts float32 [n] in shared memory to [rows, n]."""
        row = plgpu.load(x, layout=self.layout.reduce(0))
        return lax.broadcast_in_dim(row, (self.call.form.rows, *row.shape), [1])
