"""A trainer that shares no code with the engine: a decoder in plain JAX that scans Levanter's stacked layers,
and GRPO's objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine import RequestOutput

Config = Mapping[str, Any]  # of a checkpoint's config.json


def norm(x: jax.Array, weight: jax.Array, config: Config) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config["rms_norm_eps"]) * weight


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """[rows, length, ..., head_dim]"""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    angles = angles.reshape(1, x.shape[1], *[1] * (x.ndim - 3), half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def logprobs(tree: Any, tokens: jax.Array, *, config: Config) -> jax.Array:
    """Log probabilities of tokens [rows, length], each after those before it: float32 [rows, length - 1]."""
    theta, leaf = config["rope_theta"], lambda node: node["weight"].array
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        attention, mlp = weights["self_attn"], weights["mlp"]
        h = norm(x, leaf(weights["input_layernorm"]), config)
        q = jnp.einsum("rte,kgde->rtkgd", h, leaf(attention["q_proj"]))
        k = jnp.einsum("rte,kde->rtkd", h, leaf(attention["k_proj"]))
        v = jnp.einsum("rte,kde->rtkd", h, leaf(attention["v_proj"]))
        scores = jnp.einsum("rtkgd,rskd->rkgts", rotated(q, theta), rotated(k, theta)) / q.shape[-1] ** 0.5
        shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        heads = jnp.einsum("rkgts,rskd->rtkgd", shares, v)
        x = x + jnp.einsum(
            "rthd,ehd->rte", heads.reshape(*x.shape[:2], -1, v.shape[-1]), leaf(attention["o_proj"])
        )
        h = norm(x, leaf(weights["post_attention_layernorm"]), config)
        h = jax.nn.silu(h @ leaf(mlp["gate_proj"]).T) * (h @ leaf(mlp["up_proj"]).T)
        return x + h @ leaf(mlp["down_proj"]).T, None

    embeddings = leaf(tree["embeddings"]["token_embeddings"])
    head = embeddings if tree["lm_head"] is None else leaf(tree["lm_head"])
    x, _ = jax.lax.scan(layer, embeddings[tokens], tree["transformer"]["layers"]["stacked"])
    logits = norm(x, leaf(tree["transformer"]["norm"]), config) @ head.T
    return jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], -1)[..., 0]


def objective(tree: Any, tokens: Any, sampled: Any, mask: Any, advantages: Any, *, config: Config) -> Any:
    """GRPO's loss with clipped ratios, and the trainer's log probabilities."""
    mine = logprobs(tree, tokens, config=config)
    ratio = jnp.exp(jnp.where(mask, mine - sampled, 0))
    gains = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    return -(gains * mask).sum() / mask.sum(), mine


def batch(outputs: Sequence[RequestOutput], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [rows, length]; the engine's log probabilities, and where they are: [rows, length - 1]."""
    tokens = np.zeros((len(outputs), length), np.int32)
    sampled, mask = (np.zeros((len(outputs), length - 1), dtype) for dtype in (np.float32, bool))
    for row, output in enumerate(outputs):
        completion = output.outputs[0]
        prompt = [*(output.prompt_token_ids or [])]
        whole = [*prompt, *completion.token_ids]
        tokens[row, : len(whole)] = whole
        part = slice(len(prompt) - 1, len(whole) - 1)
        entries = zip(completion.token_ids, completion.logprobs or [], strict=True)
        sampled[row, part], mask[row, part] = [entry[token].logprob for token, entry in entries], True
    return tokens, sampled, mask
