"""Calibrates four-bit weights on text: the model reads the text once and quantizes each weight when its
product runs.

So GPTQ fits each weight to its actual inputs, which come from quantized weights of earlier products, and to
its outputs in the unquantized model, which reads the text in the same pass (`calibrated.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jengine.base.errors import InvalidArgument
from jengine.base.progress import Progress, progress_bar
from jengine.checkpoints.calibrated import Calibrated, twice
from jengine.checkpoints.in_memory import Tensors
from jengine.checkpoints.weights import load
from jengine.models import Model, Params, build
from jengine.models.config import ModelConfig
from jengine.models.layers import Attend
from jengine.text.tokenizer import Tokenizer
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.elementwise.rotary import Rotation, rotate_by_xla
from pallas_kernels.products.weights import is_weight, stored

LENGTH, SEQUENCES = 512, 64  # tokens per sequence; maximum sequences


def read_text(file: str | Path, tokenizer: Tokenizer) -> np.ndarray:
    """Tokenizes a text: int32 [sequences, LENGTH]. From a longer text, it takes sequences that are spread
    evenly over it.

    Raises:
        InvalidArgument: the file cannot be read, or has too few tokens.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as wrong:
        raise InvalidArgument("calibration_data", str(file), f"cannot be read as text: {wrong}") from None
    tokens = tokenizer.encode(text, add_special_tokens=False)
    count = len(tokens) // LENGTH
    if count == 0:
        raise InvalidArgument(
            "calibration_data", str(file), f"has {len(tokens)} tokens; at least {LENGTH} are needed"
        )
    every = np.array(tokens[: count * LENGTH], np.int32).reshape(count, LENGTH)
    chosen: np.ndarray = every[np.linspace(0, count - 1, min(count, SEQUENCES)).astype(int)]
    return chosen


def check_stateless(model: Model, file: str | Path) -> None:
    """Raises InvalidArgument if a model has recurrent states: it cannot be calibrated."""
    if any(group.kind == "state" for group in model.groups):
        raise InvalidArgument(
            "calibration_data", str(file), "models with recurrent states cannot be calibrated"
        )


def check_unconverted(model: ModelConfig, file: str | Path) -> None:
    """Raises InvalidArgument if a model was converted with quantization: it cannot be calibrated any more."""
    if model.converted is not None:
        raise InvalidArgument(
            "calibration_data",
            str(file),
            "the folder was converted with quantization: it is calibrated before that",
        )


def load_calibrated(
    path: Path,
    model: Model,
    mesh: Mesh,
    tokens: np.ndarray,
    progress: Progress = True,
    tensors: Tensors | None = None,
) -> Params:
    """Loads plain parameters and calibrates them; see `load`.

    Args:
        tokens: from `read_text`.
    """
    plain = build(model.config, model.dtype, model.config.max_position, "none")
    params = load(path, plain, mesh, progress, tensors)
    return calibrate(model, params, model.placed(mesh), tokens, progress)


def calibrate(
    model: Model, params: Params, targets: Params, tokens: np.ndarray, progress: Progress = True
) -> Params:
    """Quantizes plain parameters on one device to the forms of `targets`.

    Args:
        targets: the abstract parameters of `model`, with shardings.
        tokens: int32 [sequences, length].
    """

    def prepared(array: jax.Array, target: Any, axes: tuple[str | None, ...]) -> Any:
        stacked = len(axes) > 2 and axes[0] is None
        if stored(target).format.numbers != "int4" or stacked:
            return stored(target).fit(array)
        return Calibrated(array, target, bar.update)

    total = sum(stored(leaf).format.numbers == "int4" for leaf in jax.tree.leaves(targets, is_leaf=is_weight))
    with progress_bar(total=total, desc="calibrating", show=progress) as bar:
        mixed = jax.tree.map(prepared, params, targets, model.axes, is_leaf=is_weight)
        tokens = twice(tokens)
        count, length = tokens.shape
        positions = jnp.tile(jnp.arange(length), count)
        model.bind(mixed).hidden(jnp.asarray(tokens.reshape(-1)), positions, _attend(count))
    return jax.tree.map(
        lambda leaf: leaf.result() if isinstance(leaf, Calibrated) else leaf, mixed, is_leaf=is_weight
    )


def _attend(count: int) -> Attend:
    """Attention within each of `count` sequences, which have equal lengths and follow each other."""

    # by window: layers that read other layers' keys have the same window
    written: dict[int | None, tuple[jax.Array, jax.Array]] = {}

    def attend(
        layer: int, qkv: Qkv | QkvProduct | QueriesOnly, rotation: Rotation | None, options: AttentionOptions
    ) -> jax.Array:
        if isinstance(qkv, QueriesOnly):
            q = qkv.q
        else:
            q, k, v = qkv.split()
            k = k if rotation is None else rotate_by_xla(k, rotation)
            written[options.window] = k, v
        q = q if rotation is None else rotate_by_xla(q, rotation)
        q, k, v = (x.reshape(count, -1, *x.shape[1:]) for x in (q, *written[options.window]))
        y: jax.Array = _attention(q, k, v, options)
        return y.reshape(-1, *y.shape[2:])

    return attend


@jax.jit
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, options: AttentionOptions) -> jax.Array:
    """Causal attention. Arrays are [sequences, length, heads or kv_heads, head_dim]."""
    soft_cap, sinks, slopes = options.soft_cap, options.sinks, options.slopes
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    seen = (distance >= 0) & (distance < (options.window or q.shape[1]))

    def one(sequence: Sequence[jax.Array]) -> jax.Array:
        q, k, v = sequence
        k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32) * options.scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if slopes is not None:
            scores -= slopes[:, None, None] * distance
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            scores = jnp.concatenate(
                [scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], -1
            )
        weights = jax.nn.softmax(scores)[..., : len(k)]
        return jnp.einsum("hqk,khd->qhd", weights.astype(v.dtype), v)

    y: jax.Array = lax.map(one, (q, k, v))
    return y
