"""LFM2: gated short convolutions in most layers, attention in the others."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.base.errors import ModelError
from jengine.models.cache import CacheEntry
from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import check_mixed, decoder
from jengine.models.layers import GATED_W, Attend, Mixer, Recur, dense, matrix, param, row_parallel_dense
from jengine.models.llama import Llama
from jengine.models.pieces import EVERY, Piece
from jengine.models.qwen import Qwen3Attention
from jengine.models.recurrent import LinearAttention, state_entry
from pallas_kernels.elementwise.rotary import Rotation


class Lfm2Attention(Qwen3Attention):
    output_name, norm_names = "out_proj", ("q_layernorm", "k_layernorm")


class ShortConvolution(nnx.Module):
    """out(c * convolved(b * x)); one product computes b, c and x. Channels are grouped by head, to shard like
    heads.
    """

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.config, self.linear = config, config.part(LinearAttention)
        linear, hidden = self.linear, config.hidden_size
        laid, size, real = config.padded(linear.key_heads), linear.channels, slice(0, linear.key_heads)
        both = Piece(f"{name}.in_proj.weight", (3 * hidden, hidden))
        thirds = (both._replace(part=(real, i), rows=slice(i * hidden, (i + 1) * hidden)) for i in range(3))
        self.mixed = matrix((laid, 3, size, hidden), dtype, ("heads", None, None, None), *thirds)
        taps = Piece(f"{name}.conv.weight", (hidden, 1, linear.taps), (real,))
        self.convolution = param(
            (laid, size, linear.taps), dtype, ("heads", None, None), taps, multiplies=True
        )
        out = Piece(f"{name}.out_proj.weight", (hidden, hidden), (EVERY, slice(0, hidden)))
        self.out = matrix((hidden, laid * size), dtype, (None, "heads"), out)

    def __call__(self, layer: int, x: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        """x [N, hidden] -> [N, hidden]. The rotation is not used: only the convolution depends on the order
        of tokens.
        """
        weight = self.convolution[...]
        before, after, values = jnp.moveaxis(dense(x, self.mixed[...]), 2, 0).reshape(3, x.shape[0], -1)
        convolved = cast(Recur, attend).convolve(layer, before * values, weight.reshape(-1, weight.shape[-1]))
        return row_parallel_dense(after * convolved.astype(x.dtype), self.out[...])

    def cache(self, layer: int) -> CacheEntry:
        return state_entry(self.config, self.linear)


class Lfm2(Llama):
    attention = Lfm2Attention
    mlp_name, mlp_parts = "feed_forward", GATED_W
    norm_name, norm_names = "embedding_norm", ("operator_norm", "ffn_norm")

    def mixer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Mixer:
        if index in config.part(LinearAttention).layers:
            return ShortConvolution(config, dtype, f"{name}.conv")
        return super().mixer(config, dtype, name, index)


def read_lfm2(hf: Fields) -> dict[str, Any]:
    """Raises ModelError for a layer type or a bias that is not supported."""
    fields, layers = decoder(hf), int(hf["num_hidden_layers"])
    full = hf.get("full_attn_idxs")
    full = range(layers) if full is None else full
    types = hf.get("layer_types") or ["full_attention" if i in full else "conv" for i in range(layers)]
    check_mixed(types, layers, "conv", "full_attention", both="some are conv and some full_attention")
    if hf.get("conv_bias"):
        raise ModelError("conv_bias=true is not supported")
    if int(hf["conv_L_cache"]) < 2:
        raise ModelError(f"conv_L_cache={hf['conv_L_cache']} must be at least 2")
    heads = fields["num_heads"]
    if fields["hidden_size"] % heads:
        raise ModelError(
            f"hidden_size={fields['hidden_size']} is not a multiple of num_attention_heads={heads}"
        )
    convolved = tuple(i for i, kind in enumerate(types) if kind == "conv")
    size = fields["hidden_size"] // heads
    linear = LinearAttention(
        layers=convolved,
        key_heads=heads,
        value_heads=heads,
        key_dim=0,
        value_dim=size,
        taps=int(hf["conv_L_cache"]),
    )
    tied = hf.get("tie_embedding")
    return {
        **fields,
        "intermediate_size": _intermediate_size(hf),
        "norm_eps": float(hf.get("norm_eps", 1e-5)),
        "tie_embeddings": fields["tie_embeddings"] if tied is None else bool(tied),
        "parts": (linear,),
    }


def _intermediate_size(hf: Fields) -> int:
    """The MLP's size, with the adjustments in the fields."""
    size = int(hf.get("block_ff_dim") or hf["intermediate_size"])
    if not hf.get("block_auto_adjust_ff_dim", True):
        return size
    factor, multiple = hf.get("block_ffn_dim_multiplier", 1.0), int(hf.get("block_multiple_of", 256))
    size = int(2 * size / 3)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple


DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 128000, "rope_theta": 1e6,
    "tie_word_embeddings": True, "conv_L_cache": 3, "intermediate_size": 12288,
}  # fmt: skip
FAMILIES = {"lfm2": Family("LFM2", Lfm2, read_lfm2, DEFAULTS, parts=(LinearAttention,))}
