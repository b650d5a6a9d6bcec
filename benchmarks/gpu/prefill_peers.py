"""Other implementations of causal attention, on contiguous queries, keys and values.

Each function returns the seconds of a call. It raises an exception if the implementation is not available.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.gpu.timing import chained, median
from benchmarks.gpu.work import Shape


def cudnn(shape: Shape, sequences: int, tokens: int) -> float:
    def attend(q: jax.Array, _: None, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    return _chained(attend, shape, sequences, tokens)


def tokamax(shape: Shape, sequences: int, tokens: int) -> float:
    import tokamax

    def attend(q: jax.Array, _: None, k: jax.Array, v: jax.Array) -> jax.Array:
        out: jax.Array = tokamax.dot_product_attention(q, k, v, is_causal=True)
        return out

    return _chained(attend, shape, sequences, tokens)


def _chained(attend: Callable[..., jax.Array], shape: Shape, sequences: int, tokens: int) -> float:
    keys = jax.random.split(jax.random.key(1), 3)
    heads = shape.heads, shape.kv_heads, shape.kv_heads
    q, k, v = (
        jax.random.normal(key, (sequences, tokens, n, shape.head_dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    )
    return chained(attend, q, None, k, v)


def pytorch(shape: Shape, sequences: int, tokens: int) -> float:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    heads = shape.heads, shape.kv_heads, shape.kv_heads
    q, k, v = (
        torch.randn(sequences, n, tokens, shape.head_dim, dtype=torch.bfloat16, device="cuda") for n in heads
    )

    def attend() -> torch.cuda.Event:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        done = torch.cuda.Event()
        done.record()
        return done

    return median(attend, lambda done: done.synchronize())


PEERS: dict[str, Callable[[Shape, int, int], float]] = {
    "cudnn through JAX": cudnn,
    "tokamax": tokamax,
    "PyTorch SDPA": pytorch,
}
