"""Weights of Tunix's models by the names of a checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx

from jengine import InvalidArgument

INDEX = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer
LORA = re.compile(r"_lora_[ab]$")  # parameters that adapt the one of the same name without this


class Place(NamedTuple):
    """Where the numbers of a parameter are in a checkpoint.

    Attributes:
        tensors: names, with `*` for the layer. More than one: the parameter's first axis stacks them. `#`
            stands for the index in that axis.
        axes: the order of a tensor's axes in a checkpoint, whose matrices are [out, in]. Empty: as they are.
        outs: how many of these axes are outputs.
    """

    tensors: tuple[str, ...]
    axes: tuple[int, ...] = ()
    outs: int = 1


def _attention(name: str, *axes: int, outs: int) -> Place:
    return Place((f"model.layers.*.self_attn.{name}_proj.weight",), axes, outs)


def _in_layer(name: str) -> Place:
    return Place((f"model.layers.*.{name}",))


PLACES = {
    "embedder.input_embedding": Place(("model.embed_tokens.weight",)),
    "lm_head.w": Place(("lm_head.weight",), (1, 0)),
    # norms of Llama 3, Qwen 2 and Qwen 3; of Gemma
    "final_norm.w": Place(("model.norm.weight",)),
    "final_norm.scale": Place(("model.norm.weight",)),
    "layers.*.input_layernorm.w": _in_layer("input_layernorm.weight"),
    "layers.*.post_attention_layernorm.w": _in_layer("post_attention_layernorm.weight"),
    "layers.*.attn.q_norm.w": _in_layer("self_attn.q_norm.weight"),
    "layers.*.attn.k_norm.w": _in_layer("self_attn.k_norm.weight"),
    "layers.*.pre_attention_norm.scale": _in_layer("input_layernorm.weight"),
    "layers.*.post_attn_norm.scale": _in_layer("post_attention_layernorm.weight"),
    "layers.*.post_attention_norm.scale": _in_layer("post_attention_layernorm.weight"),
    "layers.*.pre_ffw_norm.scale": _in_layer("pre_feedforward_layernorm.weight"),
    "layers.*.post_ffw_norm.scale": _in_layer("post_feedforward_layernorm.weight"),
    "layers.*.attn._query_norm.scale": _in_layer("self_attn.q_norm.weight"),
    "layers.*.attn._key_norm.scale": _in_layer("self_attn.k_norm.weight"),
    # attention: [in, heads, head_dim], and [heads, head_dim, out]; in Gemma [heads, in, head_dim]
    **{f"layers.*.attn.{name}_proj.w": _attention(name, 1, 2, 0, outs=2) for name in "qkv"},
    **{f"layers.*.attn.{name}_bias": _in_layer(f"self_attn.{name}_proj.bias") for name in "qkv"},
    "layers.*.attn.o_proj.w": _attention("o", 2, 0, 1, outs=1),
    "layers.*.attn.attn_vec_einsum.w": _attention("o", 2, 0, 1, outs=1),
    "layers.*.attn.q_einsum.w": _attention("q", 0, 2, 1, outs=2),
    **{
        f"layers.*.attn.{names}_einsum.w": Place(
            tuple(f"model.layers.*.self_attn.{name}_proj.weight" for name in names), (0, 2, 1), 2
        )
        for names in ("kv", "qkv")
    },
    # MLPs [in, out]; of experts [experts, in, out]
    **{
        f"layers.*.mlp.{name}_proj.kernel": Place((f"model.layers.*.mlp.{name}_proj.weight",), (1, 0))
        for name in ("gate", "up", "down")
    },
    "layers.*.mlp.router.kernel": Place(("model.layers.*.mlp.gate.weight",), (1, 0)),
    **{
        f"layers.*.mlp.{name}_proj": Place((f"model.layers.*.mlp.experts.#.{name}_proj.weight",), (1, 0))
        for name in ("gate", "up", "down")
    },
}


def named(state: nnx.State[Any, Any]) -> dict[str, jax.Array]:
    """A state's arrays by their paths, such as `layers.0.attn.q_proj.w`."""
    return {
        ".".join(str(part) for part in path): leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for path, leaf in nnx.to_flat_state(state)
    }


def state_of(arrays: Mapping[str, jax.Array]) -> nnx.State[Any, Any]:
    """The reverse of `named`."""
    keys = {path: tuple(int(part) if part.isdigit() else part for part in path.split(".")) for path in arrays}
    return nnx.from_flat_state([(keys[path], nnx.Param(array)) for path, array in arrays.items()])


def checkpoint_tensors(state: nnx.State[Any, Any]) -> dict[str, jax.Array]:
    """The parameters of a Tunix model, as the tensors of a checkpoint in Hugging Face's layout.

    Args:
        state: of tunix.models llama3, qwen2, qwen3, gemma or gemma3.

    Raises:
        InvalidArgument: a parameter that none of these models has.
    """
    return {name: array for path, leaf in named(state).items() for name, array in _tensors(path, leaf)}


def merged(base: Mapping[str, jax.Array], lora: Mapping[str, jax.Array], alpha: float) -> dict[str, Any]:
    """Adds the products of LoRA parameters, scaled by alpha / rank, to the parameters that they adapt (Hu et
    al., 2021).

    Args:
        base: the other parameters, as `named` gives them.
        lora: pairs `NAME_lora_a` [*in, rank] and `NAME_lora_b` [rank, *out] for parameters NAME [*in, *out].

    Raises:
        InvalidArgument: no parameter of that name and shape.
    """
    out = dict(base)
    for name in sorted({LORA.sub("", path) for path in lora}):
        try:
            a, b, plain = lora[f"{name}_lora_a"], lora[f"{name}_lora_b"], base[name]
        except KeyError as missing:
            raise InvalidArgument("params", missing.args[0], f"must be given to adapt {name}") from None
        if a.shape[:-1] + b.shape[1:] != plain.shape:
            limit = f"have shapes {a.shape} and {b.shape}, whose product does not adapt {plain.shape}"
            raise InvalidArgument("params", f"{name}_lora_a and _b", limit)
        out[name] = _add(plain, a, b, alpha / a.shape[-1])
    return out


@jax.jit
def _add(plain: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    product = jax.numpy.tensordot(a, b, 1, preferred_element_type=jax.numpy.float32)
    return (plain + scale * product).astype(plain.dtype)


def _tensors(path: str, array: jax.Array) -> Iterator[tuple[str, jax.Array]]:
    layer = INDEX.search(path)
    place = PLACES.get(INDEX.sub("*", path, count=1))
    if place is None:
        limit = "is no parameter of the models that are known here; pass JengineRollout `weights`"
        raise InvalidArgument("params", path, limit)
    names = [name if layer is None else name.replace("*", layer[0]) for name in place.tensors]
    if "#" in names[0]:
        names = [names[0].replace("#", str(index)) for index in range(array.shape[0])]
    elif len(names) == 1:
        yield names[0], _laid(array, axes=place.axes, outs=place.outs) if place.axes else array
        return
    for index, name in enumerate(names):
        yield name, _laid(array[index], axes=place.axes, outs=place.outs)


@partial(jax.jit, static_argnames=("axes", "outs"))
def _laid(array: jax.Array, axes: tuple[int, ...], outs: int) -> jax.Array:
    turned = array.transpose(axes)
    size = 1
    for length in turned.shape[:outs]:
        size *= length
    return turned.reshape(size, -1)
