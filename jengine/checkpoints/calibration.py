"""Calibrates four-bit weights on text: the model reads the text once and quantizes each weight when its first
product runs.

So GPTQ fits each weight to its actual inputs, which come from quantized weights of earlier products, and to
its outputs in the unquantized model. The model reads each token twice in one pass. The first half of all
rows, the reference, goes through the unquantized weights. The second half goes through the quantized ones. So
both inputs of a weight are known when it is quantized, and it can correct errors of earlier ones. `twice`
makes the halves, and `halves` finds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jengine.base.errors import InvalidArgument
from jengine.base.progress import Progress, progress_bar
from jengine.checkpoints.in_memory import Tensors
from jengine.checkpoints.weights import load
from jengine.models import Model, Params, build
from jengine.models.config import ModelConfig
from jengine.models.whole_sequences import WholeSequences
from jengine.text.tokenizer import Tokenizer
from pallas_kernels.products.groups import Groups
from pallas_kernels.products.rows import Rows, array_of
from pallas_kernels.products.weight import Weight
from pallas_kernels.products.weights import is_weight, product, stored, weight_of
from pallas_kernels.quantization.gptq import gptq
from pallas_kernels.quantization.hadamard import gain, transform
from pallas_kernels.quantization.int4 import Int4, pack

LENGTH, SEQUENCES = 512, 64  # tokens per sequence; maximum sequences
# An expert is fitted to its own rows and, as if it had them too, to PRIOR rows of all experts and to PRIOR
# uncorrelated rows of the same variance. Measured: squared errors of outputs relative to rounding to nearest,
# in int4, on three texts that were not read, with 16 experts that are parts of two MLPs of SmolLM2-135M.
#
#     median rows of an expert      55    215    880
#     its own alone               0.94   0.82
#     and 128 of all              0.94   0.76   0.67
#     and 128 uncorrelated ones   0.79   0.71   0.66
#     and 256 of both             0.79   0.71   0.66
PRIOR = 128
CHUNK = 512  # rows that are multiplied together, and rows of an expert that are read together
Part = tuple[Any, int, int]  # a weight, and the first and the end of the rows that it multiplies


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
        model.bind(mixed).hidden(
            jnp.asarray(tokens.reshape(-1)), positions, WholeSequences(count, sparing=True)
        )
    return jax.tree.map(
        lambda leaf: leaf.result() if isinstance(leaf, Calibrated) else leaf, mixed, is_leaf=is_weight
    )


def twice(tokens: np.ndarray) -> np.ndarray:
    """Sequences [sequences, length] -> [2 * sequences, length]: the reference, and the same again."""
    return np.concatenate([tokens, tokens])


def halves(rows: int) -> tuple[slice, slice]:
    """Which rows of a step are the reference, and which are of the quantized model.

    Args:
        rows: of all tokens, in their order; also if each token has the same number of several rows.
    """
    return slice(0, rows // 2), slice(rows // 2, rows)


class Calibrated:
    """A `Weight` that is quantized when its first product runs, and multiplies `halves` of its rows by the
    unquantized and the quantized matrix. If anything else uses it first, it is rounded to nearest.
    """

    eager = True

    def __init__(self, weight: jax.Array, target: Int4, count: Any) -> None:
        self.weight = weight
        self.target, self.count = target, count
        self.shape = target.shape
        self.made: Int4 | None = None

    def product(self, x: Rows, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        x = array_of(x)
        if self.made is None:
            flat = self.weight.reshape(-1, self.shape[-1])
            self._keep(self._fitted(flat, *_moments(x, self.target.hadamard), shape=self.shape))
        y = jnp.zeros((len(x), math.prod(self.shape[:-1])), dtype or x.dtype)
        reference, quantized = halves(len(x))
        parts = (self.weight, 0, reference.stop), (self.made, quantized.start, len(x))
        # The last chunk starts earlier where x ends; that is in the same part, which has at least a chunk.
        return _products(y, x, parts, min(CHUNK, reference.stop))

    def grouped_product(self, x: jax.Array, groups: Groups, **options: Any) -> jax.Array:
        """Quantizes each expert's matrix for the quantized model's rows of its group, and a few of all of
        these; see PRIOR.

        The reference of these rows is unknown: a token may have reached other experts there.
        """
        ranges = _ranges(groups)
        taken = jnp.zeros(len(x), jnp.bool_).at[groups.place].set(True)  # other places hold any numbers
        chunk = min(CHUNK, len(x))
        x = jnp.pad(jnp.where(taken[:, None], x, 0), ((0, chunk), (0, 0)))
        if self.made is None:
            total, block = jnp.zeros((x.shape[1],) * 2), self.target.hadamard
            for _, middle, end in ranges:
                total = _sum(x, middle, end, total, chunk)
            prior = _prior(total, 2 * PRIOR / len(groups.place))
            each = []
            for expert, (_, middle, end) in enumerate(ranges):
                moments = _transformed(_sum(x, middle, end, prior, chunk), block)
                flat = _expert(self.weight, expert).reshape(-1, self.shape[-1])
                each.append(self._fitted(flat, moments, shape=self.shape[1:]))
            self._keep(jax.tree.map(lambda *arrays: jnp.stack(arrays), *each))
        y = jnp.zeros((len(x), *self.shape[1:-1]), x.dtype)
        for expert, (start, middle, end) in enumerate(ranges):
            of_reference, of_quantized = (_expert(all_of, expert) for all_of in (self.weight, self.made))
            y = _products(y, x, ((of_reference, start, middle), (of_quantized, middle, end)), chunk)
        return y[:-chunk]

    def take(self, rows: jax.Array) -> jax.Array:
        return weight_of(self.result()).take(rows)

    def __getitem__(self, index: Any) -> Weight:
        return weight_of(self.result())[index]

    def of_expert(self, expert: jax.Array, tokens: jax.Array) -> Weight:
        return self[expert]

    def result(self) -> Int4:
        """The quantized weight."""
        if self.made is None:
            self.made = stored(self.target).fit(self.weight)
        assert self.made is not None
        return self.made

    def _fitted(
        self, flat: jax.Array, moments: jax.Array, cross: jax.Array | None = None, *, shape: tuple[int, ...]
    ) -> Int4:
        """A matrix [outs, in], quantized for inputs with these moments, in the given shape [*out, in]; see
        `gptq` for cross.
        """
        block, group = self.target.hadamard, self.target.group
        weight = transform(flat.astype(jnp.float32), block) / gain(block)
        numbers, scale = (part.reshape(*shape[:-1], -1) for part in gptq(weight, moments, group, cross))
        options: Any = {"group": group, "dtype": self.target.dtype, "inputs": self.target.inputs}
        return pack(numbers, scale, None, hadamard=block, **options)

    def _keep(self, made: Int4) -> None:
        self.made = jax.device_put(made, jax.tree.map(lambda leaf: leaf.sharding, self.target))
        self.count(1)


def _ranges(groups: Groups) -> list[tuple[int, int, int]]:
    """For each group: its first place, the first place of the quantized model's rows, and its end.

    Within a group, rows keep their order (`counted`), so those of the reference come first.
    """
    size = np.asarray(groups.size)
    reference, _ = halves(len(groups.place))
    count = np.bincount(np.asarray(groups.owner[groups.place[reference]]), minlength=len(size))
    ends = np.cumsum(size)
    return list(zip(*(places.tolist() for places in (ends - size, ends - size + count, ends)), strict=True))


def _moments(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """`moments` and `cross` of `gptq`, each float32 [in, in], from the halves of x [N, in], which are
    transformed by blocks.
    """
    reference, quantized = (x[half] for half in halves(len(x)))
    return _transformed(_sum_of_products(quantized, quantized), block), _transformed(
        _sum_of_products(reference, quantized), block
    )


@jax.jit
def _sum_of_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """x^T y in float32, for x and y [N, in]."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x.T, y, precision=precision, preferred_element_type=jnp.float32)


@partial(jax.jit, static_argnames="block")
def _transformed(moments: jax.Array, block: int) -> jax.Array:
    """The moments of transformed inputs.

    Transforming the sum instead of x multiplies bfloat16 numbers exactly, and faster than as float32.
    """
    return transform(transform(moments, block).T, block).T


@partial(jax.jit, static_argnames="chunk")
def _sum(x: jax.Array, start: jax.Array, end: jax.Array, moments: jax.Array, chunk: int) -> jax.Array:
    """Adds x^T x of rows start to end of x [N, in] to moments, float32 [in, in]. At least a chunk follows."""

    def add(i: jax.Array, moments: jax.Array) -> jax.Array:
        first = start + i * chunk
        rows = lax.dynamic_slice_in_dim(x, first, chunk)
        here = first + jnp.arange(chunk) < end
        rows = jnp.where(here[:, None], rows, 0)
        added: jax.Array = _sum_of_products(rows, rows)
        return moments + added

    total: jax.Array = lax.fori_loop(0, (end - start + chunk - 1) // chunk, add, moments)
    return total


@jax.jit
def _prior(moments: jax.Array, share: float) -> jax.Array:
    """A share of these moments, float32 [in, in], and as much of those of uncorrelated inputs."""
    uncorrelated = jnp.diagonal(moments).mean() * jnp.eye(len(moments))
    both: jax.Array = share * (moments + uncorrelated)
    return both


def _products(y: jax.Array, x: jax.Array, parts: Iterable[Part], chunk: int) -> jax.Array:
    """y [N, *out], with products of parts of x [N, in] in their places.

    Chunk by chunk, only y is as large as all products. A part's last chunk may exceed its end; what follows
    must be written later, or have no meaning.
    """
    for weight, start, end in parts:
        for first in range(start, end, chunk):
            y = _with_product(y, x, weight, first, chunk)
    return y


# Compiled once for all layers. Outside of jit, control flow would be compiled again at each call.
@partial(jax.jit, donate_argnums=0, static_argnames="chunk")
def _with_product(y: jax.Array, x: jax.Array, weight: Any, first: jax.Array, chunk: int) -> jax.Array:
    """y [N, *out], with products of a chunk of x [N, in] in the chunk's place."""
    rows = product(lax.dynamic_slice_in_dim(x, first, chunk), weight, y.dtype)
    updated: jax.Array = lax.dynamic_update_slice_in_dim(y, rows.reshape(chunk, *y.shape[1:]), first, 0)
    return updated


@jax.jit
def _expert(weights: Any, expert: jax.Array) -> Any:
    """An expert's matrix, of a plain or a quantized parameter."""
    return weights[expert]
