"""Weights of Tunix's models by the names of a checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jengine import InvalidArgument

LORA = re.compile(r"_lora_[ab]$")  # parameters that adapt the one of the same name without this


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
