"""Trees with the names and shapes of trainers' models, made from the tensors of a checkpoint.

Names and shapes are those of marin-levanter 0.2.227 (with marin-haliax), maxtext 0.2.5, keras-hub 0.32.0 and
google-tunix 0.1.7. None of these packages is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

Tensors = Mapping[str, np.ndarray]


class Heads(NamedTuple):
    query: int
    kv: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Heads:
        return cls(config["num_attention_heads"], config["num_key_value_heads"])


@jax.tree_util.register_pytree_node_class
class NamedArray:
    """A pytree like Haliax's of this name: the array is its only child, without a key."""

    def __init__(self, array: Any, axes: tuple[str, ...] = ()) -> None:
        self.array, self.axes = array, axes

    def tree_flatten(self) -> tuple[tuple[Any], tuple[str, ...]]:
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes: tuple[str, ...], children: tuple[Any]) -> NamedArray:
        return cls(children[0], axes)


def levanter(tensors: Tensors, config: Mapping[str, Any], *, stacked: bool = True) -> dict[str, Any]:
    """LlamaLMHeadModel, QwenLMHeadModel or Qwen3LMHeadModel, with scan_layers or without."""
    heads = Heads.of(config)

    def shaped(name: str, array: np.ndarray) -> np.ndarray:
        if "q_proj" in name:
            return array.reshape(heads.kv, heads.query // heads.kv, -1, *array.shape[1:])
        if "k_proj" in name or "v_proj" in name:
            return array.reshape(heads.kv, -1, *array.shape[1:])
        return array.reshape(len(array), heads.query, -1) if "o_proj" in name else array

    layers = [
        nested({name: shaped(name, array) for name, array in layer.items()}, ".")
        for layer in by_layer(tensors, config)
    ]
    whole: Any = {"stacked": stacked_trees(layers)} if stacked else {"blocks": layers}
    tree = {
        "transformer": {"layers": whole, "norm": {"weight": tensors["model.norm.weight"]}},
        "embeddings": {"token_embeddings": {"weight": tensors["model.embed_tokens.weight"]}},
        "lm_head": {"weight": tensors["lm_head.weight"]} if "lm_head.weight" in tensors else None,
    }
    return jax.tree.map(NamedArray, tree)  # type: ignore[no-any-return]


def maxtext(tensors: Tensors, config: Mapping[str, Any], *, stacked: bool = True) -> dict[str, Any]:
    """A Linen or restored tree of a llama3, qwen2.5 or qwen3 model, with scan_layers or without."""
    heads, llama = Heads.of(config), config["model_type"] == "llama"

    def leaf(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
        part, _, kind = name.rpartition(".")
        part = part.replace("self_attn.", "self_attention.").replace("_norm", "_norm")
        for short, long in {"q": "query", "k": "key", "v": "value", "o": "out"}.items():
            part = part.replace(f"{short}_proj", long).replace(f".{short}_norm", f".{long}_norm")
        count = heads.query if "query" in part else heads.kv
        if "norm" in part:
            part = {
                "input_layernorm": "pre_self_attention_layer_norm",
                "post_attention_layernorm": "post_self_attention_layer_norm",
            }.get(part, part)
            return f"{part}.scale", array
        if kind == "bias":
            return f"{part}.bias", array.reshape(count, -1)
        if "out" in part:
            return f"{part}.kernel", array.T.reshape(heads.query, -1, len(array))
        if "self_attention" in part:
            split = array.T.reshape(array.shape[1], count, -1)
            half = split.shape[-1] // 2
            if llama and "value" not in part:
                split = np.stack([split[..., :half], split[..., half:]], -1).reshape(split.shape)
            return f"{part}.kernel", split / np.float32(
                (2 * half) ** 0.5
            ) if llama and "query" in part else split
        if part == "mlp.gate":
            return "moe_block.gate.kernel", array.T
        short = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}[part.rpartition(".")[2]]
        return (
            (f"moe_block.{short}", array.swapaxes(1, 2))
            if "experts" in part
            else (f"mlp.{short}.kernel", array.T)
        )

    layers = [
        nested(dict(leaf(name, array) for name, array in experts_stacked(layer).items()), ".")
        for layer in by_layer(tensors, config)
    ]
    decoder: dict[str, Any] = {"decoder_norm": {"scale": tensors["model.norm.weight"]}}
    if "lm_head.weight" in tensors:
        decoder["logits_dense"] = {"kernel": tensors["lm_head.weight"].T}
    decoder |= (
        {"layers": stacked_trees(layers, 1)}
        if stacked
        else {f"layers_{at}": layer for at, layer in enumerate(layers)}
    )
    return {
        "params": {"token_embedder": {"embedding": tensors["model.embed_tokens.weight"]}, "decoder": decoder}
    }


class Variable:
    """Has `value`, as Keras's and Flax's variables do."""

    def __init__(self, value: Any) -> None:
        self.value = value


KERAS_HUB = {
    "input_layernorm.weight": "self_attention_layernorm/scale",
    "post_attention_layernorm.weight": "feedforward_layernorm/scale",
    "self_attn.q_norm.weight": "self_attention/query_dense_layernorm/scale",
    "self_attn.k_norm.weight": "self_attention/key_dense_layernorm/scale",
    "self_attn.o_proj.weight": "self_attention/attention_output/kernel",
    "mlp.gate_proj.weight": "feedforward_gate_dense/kernel",
    "mlp.up_proj.weight": "feedforward_intermediate_dense/kernel",
    "mlp.down_proj.weight": "feedforward_output_dense/kernel",
    **{
        f"self_attn.{name[0]}_proj.{kind}": f"self_attention/{name}/{'kernel' if kind == 'weight' else kind}"
        for name in ("query", "key", "value")
        for kind in ("weight", "bias")
    },
}


def keras_hub(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Variable]:
    """Variables of Llama3Backbone, QwenBackbone or Qwen3Backbone by their paths."""
    heads = Heads.of(config)
    tree = {
        "token_embedding/embeddings": tensors["model.embed_tokens.weight"],
        "sequence_output_layernorm/scale": tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        tree["token_embedding/reverse_embeddings"] = tensors["lm_head.weight"].T
    for at, layer in enumerate(by_layer(tensors, config)):
        for name, array in layer.items():
            count = heads.query if "q_proj" in name else heads.kv
            if "o_proj" in name:
                array = array.T.reshape(heads.query, -1, len(array))
            elif "self_attn" in name and "_proj" in name:
                array = array.T.reshape(*array.shape[1:], count, -1)
            elif array.ndim == 2:
                array = array.T
            tree[f"transformer_layer_{at}/{KERAS_HUB[name]}"] = array
    return {path: Variable(jax.numpy.asarray(array)) for path, array in tree.items()}


TREES: dict[str, Callable[..., Any]] = {
    "levanter": levanter,
    "maxtext": maxtext,
    "maxtext_llama": maxtext,
    "keras_hub": keras_hub,
}


def by_layer(tensors: Tensors, config: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
    prefixes = [f"model.layers.{at}." for at in range(config["num_hidden_layers"])]
    return [
        {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}
        for prefix in prefixes
    ]


def experts_stacked(layer: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {name: array for name, array in layer.items() if ".experts." not in name}
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        each = {
            int(name.split(".")[2]): array
            for name, array in layer.items()
            if ".experts." in name and matrix in name
        }
        if each:
            out[f"mlp.experts.{matrix}.weight"] = np.stack([each[at] for at in sorted(each)])
    return out


def stacked_trees(trees: list[Any], axis: int = 0) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis), *trees)


def nested(leaves: Mapping[str, Any], separator: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, last = path.split(separator)
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree
