"""What files of families share: fields of configurations, and names and shapes of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Shapes = dict[str, tuple[int, ...]]

COMMON: dict[str, Any] = {
    **{
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
    },
    **{
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
}
SMALL = {**COMMON, "vocab_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}
BASE = {name: value for name, value in {**SMALL, "vocab_size": 96}.items() if name != "pad_token_id"}
BARE = {name: SMALL[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "vocab_size")}
MOE = {"num_hidden_layers": 3, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
GATED, W = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")  # names of an MLP's matrices


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def types(*kinds: str) -> list[str]:
    """Layer types."""
    return [f"{kind}_attention" for kind in kinds]


def linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def rms_norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,)}


def layer_norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def attention(
    name: str,
    config: dict[str, Any],
    *,
    bias: bool = False,
    output_bias: bool | None = None,
    output: str = "o_proj",
) -> Shapes:
    """Queries, keys, values and output. output_bias: None is as bias."""
    hidden, heads, kv_heads = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    dim = config.get("head_dim") or hidden // heads
    found = linear(f"{name}.{output}", hidden, heads * dim, bias if output_bias is None else output_bias)
    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        found |= linear(f"{name}.{part}_proj", count * dim, hidden, bias)
    return found


def head_norms(name: str, dim: int) -> Shapes:
    """One norm for all heads of queries, and one for those of keys."""
    return {f"{name}.{part}_norm.weight": (dim,) for part in "qk"}


def norms_of_all_heads(name: str, config: dict[str, Any]) -> Shapes:
    """Norms over all heads of queries, and of keys."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    counts = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    return {f"{name}.{part}_norm.weight": (count * dim,) for part, count in counts.items()}


def gated(
    name: str, hidden: int, ffn: int, bias: bool = False, parts: tuple[str, str, str] = GATED
) -> Shapes:
    """An MLP with gates."""
    gate, up, down = (f"{name}.{part}" for part in parts)
    return linear(gate, ffn, hidden, bias) | linear(up, ffn, hidden, bias) | linear(down, hidden, ffn, bias)


def experts(name: str, count: int, hidden: int, ffn: int, parts: tuple[str, str, str] = GATED) -> Shapes:
    """A router, and experts with tensors of their own."""
    found = linear(f"{name}.gate", count, hidden)
    for expert in range(count):
        found |= gated(f"{name}.experts.{expert}", hidden, ffn, parts=parts)
    return found


def decoder(
    config: dict[str, Any],
    layer: Callable[[str, int], Shapes],
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    norm: Callable[[str, int], Shapes] = rms_norm,
    last: str = "norm",
    head_bias: bool = False,
) -> Shapes:
    """A model with Llama's names: embeddings, layers with norms, the last norm, and the output head unless
    tied.

    Args:
        layer: gives the other tensors of a layer, from its name and its index.
        norms: names of each layer's norms; last: of the last one.
    """
    hidden, table = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    found: Shapes = {"model.embed_tokens.weight": table, **norm(f"model.{last}", hidden)}
    for index in range(config["num_hidden_layers"]):
        name = f"model.layers.{index}"
        found |= layer(name, index)
        for place in norms:
            found |= norm(f"{name}.{place}", hidden)
    return found | ({} if config["tie_word_embeddings"] else linear("lm_head", *table, head_bias))
