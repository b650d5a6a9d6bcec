"""BLOOM: ALiBi instead of position embeddings.

Two additional channels of queries and keys implement it. A key at position p has p // 256 and p % 256 there, which
every dtype represents exactly. A query has the factors whose product with them is slope * p. This is ALiBi, up to a
term that is the same for all keys of a query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jengine.errors import InvalidArgument
from jengine.model_config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.layers import Attend, Attention, Layer, LayerNorm, Mlp, matrix
from jengine.models.llama import Llama
from jengine.models.pieces import EVERY, Part, Piece
from jengine.parallel.collectives import shard_index
from pallas_kernels.qkv import Qkv, QkvProduct, QueriesOnly

CHANNELS = 16  # added to each head; two are used, but kernels need multiples of 16
STEP = 256


class BloomAttention(Attention):
    """Attention whose heads have CHANNELS additional channels, with zero weights, that are not in the checkpoint."""

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        if config.shards > config.num_heads:
            raise InvalidArgument("tensor_parallel_size", config.shards, f"must be at most {config.num_heads}, the heads")
        super().__init__(config, dtype, name)
        dim, hidden = config.head_dim, config.hidden_size
        laid, real = config.num_kv_heads_padded, dim - CHANNELS
        out = Piece(f"{name}.dense.weight", (hidden, config.num_heads * real))
        ends = ((head * dim, slice(head * real, (head + 1) * real)) for head in range(config.num_heads))
        source = (out._replace(part=(EVERY, slice(start, start + real)), columns=columns) for start, columns in ends)
        self.o = matrix((hidden, laid * dim), dtype, (None, "heads"), *source)

    def output_source(self, name: str, kind: str, *shape: int) -> Piece:
        return Piece(f"{name}.dense.{kind}", shape)

    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        """One tensor that stores query, key and value of each head together."""
        heads, dim = self.config.num_heads, self.config.head_dim
        real = dim - CHANNELS
        piece = Piece(f"{name}.query_key_value.{kind}", (3 * heads * real, *inputs))

        def one(head: int, part: int) -> Piece:
            start = (3 * head + part) * real
            return piece._replace(part=(head, slice(part * dim, part * dim + real)), rows=slice(start, start + real))

        return tuple(one(head, part) for head in range(heads) for part in range(3))


class Bloom(Llama):
    prefix = "transformer."
    embed_name, layers_name, norm_name = "word_embeddings", "h", "ln_f"
    norm_type = LayerNorm

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        super().__init__(config, dtype, max_model_len)
        self.embedding_norm = LayerNorm(config.hidden_size, config, dtype, f"{self.prefix}word_embeddings_layernorm")

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        return Layer(
            LayerNorm(config.hidden_size, config, dtype, f"{name}.input_layernorm"),
            BloomAttention(config, dtype, f"{name}.self_attention"),
            LayerNorm(config.hidden_size, config, dtype, f"{name}.post_attention_layernorm"),
            Mlp(config, dtype, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"),
        )

    def embedded(self, tokens: jax.Array) -> jax.Array:
        return self.embedding_norm(super().embedded(tokens))

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        config = self.config
        real = config.head_dim - CHANNELS
        every = jnp.array(slopes(config.num_heads) + [0.0] * (config.num_kv_heads_padded - config.num_heads), jnp.float32)
        places = jnp.stack([positions // STEP, positions % STEP], -1)[:, None]

        def biased(layer: int, qkv: Qkv | QkvProduct | QueriesOnly, *, scale: float, **how: Any) -> jax.Array:
            assert not isinstance(qkv, QueriesOnly)
            q, k, v = qkv.split()
            own = lax.dynamic_slice_in_dim(every, shard_index() * q.shape[1], q.shape[1]) / scale
            factors = jnp.stack([own * STEP, own], -1)
            q = q.at[..., real : real + 2].set(factors.astype(q.dtype))
            k = k.at[..., real : real + 2].set(places.astype(k.dtype))
            return attend(layer, Qkv(q, k, v), scale=scale, **how)

        return super().hidden(tokens, positions, biased)


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes (Press et al. 2022).

    For a power of two, they are a geometric sequence. Other numbers of heads continue with every second element of the
    sequence for the next power of two.
    """
    whole = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return first + [2.0 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]


def read_bloom(hf: Fields) -> dict[str, Any]:
    hidden, heads = int(hf.get("n_embed") or hf["hidden_size"]), int(hf.get("n_head") or hf["num_attention_heads"])
    layers = int(hf.get("n_layer") or hf["num_hidden_layers"])
    return {
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads + CHANNELS,
        "attention_scale": (hidden // heads) ** -0.5,
        "unrotated_layers": tuple(range(layers)),
        "max_position": int(hf.get("seq_length", 2048)),
        "norm_eps": float(hf.get("layer_norm_epsilon", 1e-5)),
        "activation": "gelu_new",
        "tie_embeddings": bool(hf.get("tie_word_embeddings", True)),
        "gated_mlp": False,
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
    }


FAMILIES = {"bloom": Family("BLOOM, BLOOMZ", Bloom, read_bloom, eight_bit_cache=False)}
