"""Weights as trainers store them, read as the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from jengine.base.errors import InvalidArgument
from jengine.checkpoints.stored import StoredTensor

INDEX = re.compile(r"(?<=[._])\d+(?=\.)")  # of a layer, in a path
STACKED = "*#"  # axes that tensors are stacked in
Index = tuple[int, ...]


class LeafLayout(NamedTuple):
    """How a leaf of a trainer's tree stores tensors of a Hugging Face checkpoint.

    Attributes:
        tensors: their names, with `*` for the layer and `#` for the expert. Several names are stacked in the
            axis `#`.
        axes: a letter for each axis of the leaf: upper case for outputs, lower case for inputs, `*` for
            layers, `#` for experts or names. A checkpoint's matrix is [outputs, inputs]; several axes of
            either are flattened. Empty: the leaf is the tensor.
        interleaved: whether the numbers that RoPE rotates as a pair are neighbours in the last output axis.
            In a checkpoint they are half a head apart.
        scaled: whether numbers are divided by the square root of the last output axis.
    """

    tensors: tuple[str, ...]
    axes: str = ""
    interleaved: bool = False
    scaled: bool = False


Layout = Mapping[str, LeafLayout]


def _leaf(tensor: str, axes: str = "", *, interleaved: bool = False, scaled: bool = False) -> LeafLayout:
    return LeafLayout((tensor,), axes, interleaved, scaled)


def _in_layers(path: str, leaves: Layout, stacked_at: int | None = None) -> dict[str, LeafLayout]:
    """Layouts of leaves by their whole paths.

    Args:
        path: of a layer, with `*` for its index, or of all layers if they are stacked.
        leaves: by their paths in a layer. Their tensors are named as in a checkpoint's layer.
        stacked_at: the axis of stacked layers.
    """
    layouts = {}
    for name, leaf in leaves.items():
        axes = leaf.axes
        if stacked_at is not None:
            axes = f"{axes[:stacked_at]}*{axes[stacked_at:]}"
        names = tuple(f"model.layers.*.{tensor}" for tensor in leaf.tensors)
        layouts[f"{path}.{name}"] = leaf._replace(tensors=names, axes=axes)
    return layouts


_LEVANTER = {  # named as in a checkpoint
    name: _leaf(name, axes)
    for name, axes in {
        "input_layernorm.weight": "O",
        "post_attention_layernorm.weight": "O",
        "self_attn.q_proj.weight": "KGDi",  # [KV heads, query heads of each]
        "self_attn.q_proj.bias": "KGD",
        **{f"self_attn.{key}_proj.weight": "HDi" for key in "kv"},
        **{f"self_attn.{key}_proj.bias": "HD" for key in "kv"},
        **{f"self_attn.{key}_norm.weight": "O" for key in "qk"},
        "self_attn.o_proj.weight": "Ohd",
        **{f"mlp.{name}_proj.weight": "Oi" for name in ("gate", "up", "down")},
    }.items()
}
_MAXTEXT = {
    "pre_self_attention_layer_norm.scale": _leaf("input_layernorm.weight", "O"),
    "post_self_attention_layer_norm.scale": _leaf("post_attention_layernorm.weight", "O"),
    **{f"self_attention.{name}.kernel": _leaf(f"self_attn.{name[0]}_proj.weight", "iHD") for name in
       ("query", "key", "value")},
    **{f"self_attention.{name}.bias": _leaf(f"self_attn.{name[0]}_proj.bias", "HD") for name in
       ("query", "key", "value")},
    **{f"self_attention.{name}_norm.scale": _leaf(f"self_attn.{name[0]}_norm.weight", "O") for name in
       ("query", "key")},
    "self_attention.out.kernel": _leaf("self_attn.o_proj.weight", "hdO"),
    "moe_block.gate.kernel": _leaf("mlp.gate.weight", "iO"),
}  # fmt: skip
for _name, _projection in {"wi_0": "gate", "wi_1": "up", "wo": "down"}.items():
    _MAXTEXT[f"mlp.{_name}.kernel"] = _leaf(f"mlp.{_projection}_proj.weight", "iO")
    _MAXTEXT[f"moe_block.{_name}"] = _leaf(f"mlp.experts.#.{_projection}_proj.weight", "#iO")
_MAXTEXT_LLAMA = _MAXTEXT | {
    "self_attention.query.kernel": _leaf("self_attn.q_proj.weight", "iHD", interleaved=True, scaled=True),
    "self_attention.key.kernel": _leaf("self_attn.k_proj.weight", "iHD", interleaved=True),
}
_KERAS_HUB = {
    "self_attention_layernorm.scale": _leaf("input_layernorm.weight"),
    "feedforward_layernorm.scale": _leaf("post_attention_layernorm.weight"),
    **{f"self_attention.{name}.{part}": leaf for part in ("kernel", "bias") for name in
       ("query", "key", "value") for leaf in [_MAXTEXT[f"self_attention.{name}.{part}"]]},
    **{f"self_attention.{name}_dense_layernorm.scale": _leaf(f"self_attn.{name[0]}_norm.weight") for name in
       ("query", "key")},
    "self_attention.attention_output.kernel": _leaf("self_attn.o_proj.weight", "hdO"),
    **{f"feedforward_{name}_dense.kernel": _leaf(f"mlp.{projection}_proj.weight", "iO") for name, projection
       in {"gate": "gate", "intermediate": "up", "output": "down"}.items()},
}  # fmt: skip
_TUNIX = {
    # norms of Llama 3, Qwen 2 and Qwen 3; of Gemma
    **{f"{name}.w": _leaf(f"{name}.weight") for name in ("input_layernorm", "post_attention_layernorm")},
    **{f"attn.{key}_norm.w": _leaf(f"self_attn.{key}_norm.weight") for key in "qk"},
    "pre_attention_norm.scale": _leaf("input_layernorm.weight"),
    "post_attn_norm.scale": _leaf("post_attention_layernorm.weight"),
    "post_attention_norm.scale": _leaf("post_attention_layernorm.weight"),
    "pre_ffw_norm.scale": _leaf("pre_feedforward_layernorm.weight"),
    "post_ffw_norm.scale": _leaf("post_feedforward_layernorm.weight"),
    "attn._query_norm.scale": _leaf("self_attn.q_norm.weight"),
    "attn._key_norm.scale": _leaf("self_attn.k_norm.weight"),
    **{f"attn.{key}_proj.w": _leaf(f"self_attn.{key}_proj.weight", "iHD") for key in "qkv"},
    **{f"attn.{key}_bias": _leaf(f"self_attn.{key}_proj.bias") for key in "qkv"},
    "attn.o_proj.w": _leaf("self_attn.o_proj.weight", "hdO"),
    "attn.attn_vec_einsum.w": _leaf("self_attn.o_proj.weight", "hdO"),
    "attn.q_einsum.w": _leaf("self_attn.q_proj.weight", "HiD"),
    **{f"attn.{keys}_einsum.w": LeafLayout(tuple(f"self_attn.{key}_proj.weight" for key in keys), "#HiD")
       for keys in ("kv", "qkv")},
    **{f"mlp.{name}_proj.kernel": _leaf(f"mlp.{name}_proj.weight", "iO") for name in ("gate", "up", "down")},
    "mlp.router.kernel": _leaf("mlp.gate.weight", "iO"),
    **{f"mlp.{name}_proj": _leaf(f"mlp.experts.#.{name}_proj.weight", "#iO") for name in
       ("gate", "up", "down")},
}  # fmt: skip


def _maxtext(leaves: Layout) -> Layout:
    return {
        "token_embedder.embedding": _leaf("model.embed_tokens.weight"),
        "decoder.decoder_norm.scale": _leaf("model.norm.weight"),
        "decoder.logits_dense.kernel": _leaf("lm_head.weight", "iO"),
        **_in_layers("decoder.layers", leaves, stacked_at=1),
        **_in_layers("decoder.layers_*", leaves),
    }


LAYOUTS: Mapping[str, Layout] = {
    "levanter": {
        "embeddings.token_embeddings.weight": _leaf("model.embed_tokens.weight"),
        "transformer.norm.weight": _leaf("model.norm.weight"),
        "lm_head.weight": _leaf("lm_head.weight"),
        **_in_layers("transformer.layers.stacked", _LEVANTER, stacked_at=0),
        **_in_layers("transformer.layers.blocks.*", _LEVANTER),
    },
    "maxtext": _maxtext(_MAXTEXT),
    "maxtext_llama": _maxtext(_MAXTEXT_LLAMA),
    "keras_hub": {
        "token_embedding.embeddings": _leaf("model.embed_tokens.weight"),
        "token_embedding.reverse_embeddings": _leaf("lm_head.weight", "iO"),
        "sequence_output_layernorm.scale": _leaf("model.norm.weight"),
        **_in_layers("transformer_layer_*", _KERAS_HUB),
    },
    "tunix": {
        "embedder.input_embedding": _leaf("model.embed_tokens.weight"),
        "lm_head.w": _leaf("lm_head.weight", "iO"),
        "final_norm.w": _leaf("model.norm.weight"),
        "final_norm.scale": _leaf("model.norm.weight"),
        **_in_layers("layers.*", _TUNIX),
    },
}


class LeafTensor(StoredTensor):
    """A checkpoint's tensor that is cut from a trainer's leaf when the engine reads it.

    Attributes:
        leaf: numpy or JAX, with any sharding.
    """

    def __init__(
        self, leaf: np.ndarray | jax.Array, leaf_layout: LeafLayout, index: Index, layout: Layout
    ) -> None:
        """
        Args:
            index: of the tensor in the leaf's stacked axes.
            layout: the whole tree's.
        """
        self.leaf, self.layout, self._index = leaf, layout, np.array(index, np.int32)
        cut = partial(
            _cut_on_device if isinstance(leaf, jax.Array) else _cut,
            leaf_layout=leaf_layout._replace(tensors=()),
        )
        sizes = list(zip(leaf_layout.axes, leaf.shape, strict=True))
        outputs = math.prod(size for axis, size in sizes if axis.isupper())
        inputs = [size for axis, size in sizes if axis.islower()]
        shape = (outputs, *([math.prod(inputs)] if inputs else []))
        super().__init__(shape, lambda: cut(leaf, self._index))
        self.dtype = leaf.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)

    def missing(self, tensor: str) -> str:
        """The path of the leaf that should have given another tensor, for errors."""
        for path, leaf in self.layout.items():
            for name in leaf.tensors:
                pattern = re.escape(name).replace(r"\*", r"(\d+)").replace(r"\#", r"\d+")
                if match := re.fullmatch(pattern, tensor):
                    return path.replace("*", match[1]) if "*" in path else path
        return tensor


def trainer_weights(tree: Any, layout: str | Layout) -> dict[str, Any]:
    """A trainer's weights for `LLM(params=...)` and `update_weights`. No array is copied before the engine
    reads it: then each tensor is cut from its leaf on the leaf's devices.

    Args:
        tree: a pytree of numpy or JAX arrays with any sharding: nested mappings, an nnx.Module or nnx.State,
            an Equinox module with Haliax arrays, a restored Orbax checkpoint, or a mapping of paths to Keras
            variables. Leaves that are no arrays are left out.
        layout: `levanter` (Llama, Qwen 2, Qwen 3), `maxtext` (Qwen 2.5, Qwen 3 with and without experts),
            `maxtext_llama` (Llama 3), `keras_hub` (Llama, Qwen 2, Qwen 3), or `tunix` (Llama 3,
            Qwen 2, Qwen 3, Gemma, Gemma 3). Or layouts of leaves by their paths: keys joined by dots, with
            `*` for a layer's index.

    Returns:
        Tensors by the names of a Hugging Face checkpoint.

    Raises:
        InvalidArgument: the layout is unknown, or has no leaf of a name, or a leaf has other axes.
    """
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise InvalidArgument("layout", layout, f"must be a mapping or one of {', '.join(LAYOUTS)}")
        layout = LAYOUTS[layout]
    weights: dict[str, Any] = {}
    for path, leaf in _leaves(tree):
        layer = None if path in layout else INDEX.search(path)
        leaf_layout = layout.get(path if layer is None else INDEX.sub("*", path, count=1))
        if leaf_layout is None:
            raise InvalidArgument("params", f"{path} {list(leaf.shape)}", "is no leaf of the layout")
        if leaf_layout.axes and len(leaf_layout.axes) != leaf.ndim:
            limit = f"must have {len(leaf_layout.axes)} axes, as {leaf_layout.axes} in the layout"
            raise InvalidArgument("params", f"{path} {list(leaf.shape)}", limit)
        for name, index in _names(leaf_layout, leaf.shape):
            whole = name if layer is None else name.replace("*", layer[0])
            if whole in weights:
                raise InvalidArgument("params", f"{path} {list(leaf.shape)}", f"gives {whole} a second time")
            weights[whole] = LeafTensor(leaf, leaf_layout, index, layout) if leaf_layout.axes else leaf
    return weights


def without_flax(tree: Any) -> Any:
    """The parameters of an nnx.Module or nnx.State as nested dicts; another tree as it is."""
    tree = nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def _leaves(tree: Any) -> Iterator[tuple[str, np.ndarray | jax.Array]]:
    for keys, leaf in jax.tree_util.tree_flatten_with_path(without_flax(tree))[0]:
        named = [key for key in keys if not isinstance(key, jax.tree_util.FlattenedIndexKey)]
        path = jax.tree_util.keystr(tuple(named), simple=True, separator=".").replace("/", ".")
        while path.startswith("params."):  # Linen's collection
            path = path.removeprefix("params.")
        array = leaf if isinstance(leaf, np.ndarray | jax.Array) else getattr(leaf, "value", None)
        if isinstance(array, np.ndarray | jax.Array):
            yield path.removesuffix(".value"), array


def _names(leaf_layout: LeafLayout, shape: tuple[int, ...]) -> Iterator[tuple[str, Index]]:
    """The leaf's tensors, and their indices in its stacked axes."""
    stacked = [(axis, size) for axis, size in zip(leaf_layout.axes, shape, strict=False) if axis in STACKED]
    for index in np.ndindex(*(size for _, size in stacked)):
        at = dict(zip((axis for axis, _ in stacked), index, strict=True))
        name = leaf_layout.tensors[at.get("#", 0) if len(leaf_layout.tensors) > 1 else 0]
        for axis, number in at.items():
            name = name.replace(axis, str(number))
        yield name, index


def _cut(leaf: Any, index: Any, leaf_layout: LeafLayout) -> Any:
    """One tensor of a leaf."""
    axes, numbers = leaf_layout.axes, iter(index)
    part = leaf[tuple(next(numbers) if axis in STACKED else slice(None) for axis in axes)]
    rest = [axis for axis in axes if axis not in STACKED]
    outputs = [at for at, axis in enumerate(rest) if axis.isupper()]
    inputs = [at for at, axis in enumerate(rest) if axis.islower()]
    part = part.transpose(*outputs, *inputs)
    last = len(outputs) - 1
    size = part.shape[last]
    if leaf_layout.interleaved:
        part = part.take(np.r_[0:size:2, 1:size:2], axis=last)
    if leaf_layout.scaled:
        part = (part.astype(np.float32) * np.float32(size**0.5)).astype(leaf.dtype)
    return part.reshape(math.prod(part.shape[: last + 1]), *([-1] if inputs else []))


_cut_in_program = jax.jit(_cut, static_argnames="leaf_layout")


def _cut_on_device(leaf: jax.Array, index: Any, leaf_layout: LeafLayout) -> Any:
    """In a mesh without explicit axes, which reshapes could not keep."""
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
        leaf = jax.device_put(leaf, NamedSharding(mesh, sharding.spec))
    with jax.set_mesh(None):
        return _cut_in_program(leaf, index, leaf_layout=leaf_layout)
