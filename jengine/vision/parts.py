"""Building blocks of encoders: products, norms, and attention within segments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.models.layers import dense, matrix, param, value
from jengine.models.pieces import Piece
from jengine.models.rope import Rope
from pallas_kernels.elementwise.rotary import Rotation

QUERIES = 256  # whose scores are computed at once
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q, k, v [N, heads, dim] -> as q


class Linear(nnx.Module):
    """A product with a bias. A convolution whose kernels do not overlap is one, too."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        dtype: jax.typing.DTypeLike,
        name: str,
        *,
        biased: bool = True,
        stored: tuple[int, ...] | None = None,
        transposed: bool = False,
    ) -> None:
        """stored: the weight's shape in the checkpoint, if it is not [outputs, inputs]."""
        shape = stored or ((inputs, outputs) if transposed else (outputs, inputs))
        self.inputs = inputs
        weight = name if transposed else f"{name}.weight"
        piece = Piece(weight, shape, transposed=transposed)
        self.weight = matrix((outputs, inputs), dtype, (None, None), piece, exact=True)
        self.bias = param((outputs,), dtype, (None,), Piece(f"{name}.bias", (outputs,))) if biased else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return dense(x, self.weight[...], value(self.bias))


def axial_rotation(head_dim: int, theta: float, rows: jax.Array, columns: jax.Array) -> Rotation:
    """Rotary embedding in two dimensions: the first quarter of channels turns with the row, the second with
    the column, and each pairs with a channel of the other half. rows and columns int32[N].
    """
    frequencies = tuple(theta ** (-i / (head_dim // 2)) for i in range(0, head_dim // 2, 2))
    count = len(frequencies)
    return Rope(frequencies * 2, axes=(0,) * count + (1,) * count).cos_sin(jnp.stack([rows, columns]))


def within_segments(segments: jax.Array, scale: float | None = None) -> Attention:
    """Attention of tokens to all tokens of their segment, before and after them.

    Args:
        segments: int32[N].
        scale: multiplies the scores; None: one over the root of a head's size.
    """
    padding = -len(segments) % QUERIES

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def some(args: tuple[jax.Array, jax.Array]) -> jax.Array:
            queries, query_segments = args
            return _attention(queries, k, v, query_segments[:, None] == segments, scale)

        queries = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
        query_segments = jnp.pad(segments, (0, padding), mode="edge")
        blocks = queries.reshape(-1, QUERIES, *q.shape[1:]), query_segments.reshape(-1, QUERIES)
        out: jax.Array = lax.map(some, blocks).reshape(queries.shape)[: len(q)]
        return out

    return attend


def within_frames(size: int) -> Attention:
    """Attention within segments of this many tokens each, padding too."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        frame = within_segments(jnp.zeros(size, jnp.int32))
        frames = tuple(x.reshape(-1, size, *x.shape[1:]) for x in (q, k, v))
        out: jax.Array = lax.map(lambda parts: frame(*parts), frames).reshape(q.shape)
        return out

    return attend


def within_runs(runs: jax.Array, longest: int) -> Attention:
    """Attention within segments that are runs of at most `longest` tokens: only neighbours are looked at.

    Neighbouring runs need different numbers. runs int32[N].
    """
    padding = -len(runs) % longest
    runs_of_queries = jnp.pad(runs, (0, padding)).reshape(-1, longest)

    def around(x: jax.Array, filling: int = 0) -> jax.Array:
        """[blocks, longest, ...] -> [blocks, 3 longest, ...]: the block before, the block, and the next."""
        ends = jnp.full_like(x[:1], filling)
        return jnp.concatenate([jnp.concatenate([ends, x[:-1]]), x, jnp.concatenate([x[1:], ends])], axis=1)

    near = around(runs_of_queries, -1)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        queries, keys, values = (
            jnp.pad(x, ((0, padding), (0, 0), (0, 0))).reshape(-1, longest, *x.shape[1:]) for x in (q, k, v)
        )
        seen = runs_of_queries[:, :, None] == near[:, None, :]
        out = jax.vmap(_attention)(queries, around(keys), around(values), seen)
        return out.reshape(-1, *q.shape[1:])[: len(q)]

    return attend


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, scale: float | None = None
) -> jax.Array:
    """q [Q, heads, dim], k and v [K, heads, dim], seen bool [Q, K] -> as q. Each query sees a key.

    A query that sees a value that is not finite gets NaN. No other query does: 0 * NaN would be NaN.
    """
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.where(seen, product("qhd,khd->hqk", q, k) * scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    finite = jnp.isfinite(v).all((1, 2))
    out = product("hqk,khd->qhd", weights, jnp.where(finite[:, None, None], v, 0))
    sees_overflow = (seen & ~finite).any(1)
    return jnp.where(sees_overflow[:, None, None], jnp.nan, out).astype(q.dtype)
