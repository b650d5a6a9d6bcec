"""The gated delta rule (Yang et al., "Gated Delta Networks", 2025): a recurrence whose state is a matrix for
each head. And linear attention with decay (Qin et al., "Lightning Attention-2", 2024), which adds values as
they are.

A token with key k, value v, log decay g and rate b turns the state S [key_dim, value_dim] into

    S' = exp(g) S + k (b (v - exp(g) S^T k))^T

and reads S'^T q. Linear attention has no rate: S' = exp(g) S + k v^T. All arrays are float32, since the state
accumulates over a whole sequence.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64  # maximum tokens computed together
FEW = 16  # minimum tokens of a chunk, if a tile has more
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class PreparedChunk(NamedTuple):
    """The parts of a chunk that do not depend on the previous state; see `prepare`. Leading axes are
    arbitrary, then heads.
    """

    # [..., tokens, value_dim]: each token's addition to the state, for a zero state before the chunk
    inputs: jax.Array
    # [..., tokens, key_dim]: how the additions depend on the state before the chunk; None: they do not
    reads: jax.Array | None
    queries: jax.Array  # [..., tokens, key_dim], decayed
    keys: jax.Array  # [..., tokens, key_dim], decayed to the end of the chunk
    scores: jax.Array  # [..., tokens, tokens], queries times keys, decayed; lower triangle
    decay: jax.Array  # [...], of the whole chunk


def step(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    rate: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token: the state after it, and its output.

    Args:
        state: [..., key_dim, value_dim].
        q, k: [..., key_dim].
        v: [..., value_dim].
        decay: [...], logarithms, at most 0.
        rate: [...], from 0 to 1; None: linear attention.

    Returns:
        The state; [..., value_dim].
    """
    state = state * jnp.exp(decay)[..., None, None]
    change = v if rate is None else rate[..., None] * (v - einsum("...kv,...k->...v", state, k))
    state = state + k[..., :, None] * change[..., None, :]
    return state, einsum("...kv,...k->...v", state, q)


class Earlier(NamedTuple):
    """The tokens before those of a call of `steps`, in order. The first axis is that of tokens."""

    keys: jax.Array
    decays: jax.Array
    changes: jax.Array  # what each of them adds to the state, at its key

    @classmethod
    def none(cls, count: int, k: jax.Array, v: jax.Array) -> Earlier:
        """In place of `count` tokens."""
        shapes = k.shape[1:], k.shape[1:-1], v.shape[1:]
        return cls(*[jnp.zeros((count, *shape), k.dtype) for shape in shapes])


def steps(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    rate: jax.Array | None,
    behind: jax.Array,
    earlier: Earlier,
) -> tuple[jax.Array, jax.Array, Earlier]:
    """`step` for tokens of several sequences, those of a sequence one after the other.

    A token's state is computed from the one before the sequence's first token, and from what each token since
    then adds. So the states of all tokens are computed side by side.

    Args: as `step`, with the axis of tokens first.
        state: for each token, that before the first token of its sequence.
        behind: [tokens], how many tokens of its sequence come before it, in `earlier` too; at most as many as
            `earlier` has.

    Returns:
        The state after each token; [tokens, ..., value_dim]; as many last tokens as `earlier` has.
    """
    tokens, span = decay.shape[0], earlier.decays.shape[0]
    keys, decays = jnp.concatenate([earlier.keys, k]), jnp.concatenate([earlier.decays, decay])

    def window(x: jax.Array) -> jax.Array:
        """[most + 1, tokens, ...]: each token, and those before it, the last first; zeros for those of other
        sequences, which may not be finite."""
        same = [behind >= back for back in range(span + 1)]
        parts = [x[span - back : span - back + tokens] for back in range(span + 1)]
        shape = -1, *[1] * (x.ndim - 1)
        return jnp.stack([jnp.where(a.reshape(shape), part, 0) for a, part in zip(same, parts, strict=True)])

    each, windows = window(decays), window(keys)
    total = jnp.exp(jnp.sum(each, axis=0))
    since = jnp.exp(jnp.cumsum(each, axis=0) - each)  # decay from each token of the window on
    read, queried = jnp.moveaxis(einsum("...kv,...ck->...cv", state, jnp.stack([k, q], axis=-2)), -2, 0)
    change = v
    if rate is not None:
        first = rate[..., None] * (v - total[..., None] * read)
        among = (rate * since * jnp.sum(k * windows, axis=-1))[1:, ..., None]

        def settle(_: int, change: jax.Array) -> jax.Array:
            """Right for tokens with one more before them than those for which `change` is."""
            return first - jnp.sum(among * window(jnp.concatenate([earlier.changes, change]))[1:], axis=0)

        change = lax.fori_loop(0, span, settle, first)
    changes = jnp.concatenate([earlier.changes, change])
    added = window(changes)
    scores = (since * jnp.sum(q * windows, axis=-1))[..., None]
    out = total[..., None] * queried + jnp.sum(scores * added, axis=0)
    windows *= since[..., None]
    after = total[..., None, None] * state
    for back in range(span + 1):
        after += windows[back, ..., :, None] * added[back, ..., None, :]
    return after, out, Earlier(keys[tokens:], decays[tokens:], changes[tokens:])


def chunk_size(tokens: int) -> int:
    """Size of the chunks of a tile: the largest divisor that is at most CHUNK, or the whole tile if that
    divisor is small."""
    size = next(size for size in range(min(CHUNK, tokens), 0, -1) if tokens % size == 0)
    return size if size >= FEW else tokens


def prepare(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, rate: jax.Array | None = None
) -> PreparedChunk:
    """Computes everything that does not depend on the previous state (the WY representation), for any number
    of chunks at once.

    Args: as `step`, with an additional axis of tokens: before the last one of q, k and v, and the last one of
    decay and rate.
    """
    total = jnp.cumsum(decay, axis=-1)
    tokens = decay.shape[-1]
    earlier = jnp.tril(jnp.ones((tokens, tokens), bool))
    # decay from a token to a later one
    between = jnp.exp(jnp.where(earlier, total[..., :, None] - total[..., None, :], -jnp.inf))
    inputs, reads = v, None
    if rate is not None:
        weighted = k * rate[..., None]
        system = jnp.tril(einsum("...tk,...sk->...ts", weighted, k) * between, -1)
        right = jnp.concatenate([v * rate[..., None], weighted * jnp.exp(total)[..., None]], axis=-1)
        solved = einsum("...ts,...sd->...td", inverse(system), right)
        inputs, reads = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    return PreparedChunk(
        inputs=inputs,
        reads=reads,
        queries=q * jnp.exp(total)[..., None],
        keys=k * jnp.exp(total[..., -1:] - total)[..., None],
        scores=einsum("...tk,...sk->...ts", q, k) * between,
        decay=jnp.exp(total[..., -1]),
    )


def inverse(lower: jax.Array) -> jax.Array:
    """(1 + lower)^-1 of strictly lower triangular matrices [..., n, n]: diagonal blocks are merged pairwise.

    Avoids lax.linalg.triangular_solve: on a CPU it calls LAPACK, which a saved program cannot find.
    """
    count, size = lower.shape[-1], 1
    laid = 1 << (count - 1).bit_length()
    lower = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, laid - count)] * 2)
    blocks = jnp.ones((*lower.shape[:-2], laid, 1, 1), lower.dtype)
    while size < laid:
        pairs = laid // (2 * size)
        on_diagonal = jnp.diagonal(
            lower.reshape(*lower.shape[:-2], pairs, 2 * size, pairs, 2 * size), axis1=-4, axis2=-2
        )
        corners = jnp.moveaxis(on_diagonal, -1, -3)[..., size:, :size]
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        corners = -einsum("...ij,...jk,...kl->...il", second, corners, first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        blocks, size = (
            jnp.concatenate([upper, jnp.concatenate([corners, second], axis=-1)], axis=-2),
            2 * size,
        )
    return blocks[..., 0, :count, :count]


def advance(state: jax.Array, chunk: PreparedChunk) -> tuple[jax.Array, jax.Array]:
    """The state [..., key_dim, value_dim] after a chunk, and the outputs of its tokens [..., tokens,
    value_dim].
    """
    change = (
        chunk.inputs
        if chunk.reads is None
        else chunk.inputs - einsum("...tk,...kv->...tv", chunk.reads, state)
    )
    out = einsum("...tk,...kv->...tv", chunk.queries, state) + einsum(
        "...ts,...sv->...tv", chunk.scores, change
    )
    return state * chunk.decay[..., None, None] + einsum("...tk,...tv->...kv", chunk.keys, change), out
