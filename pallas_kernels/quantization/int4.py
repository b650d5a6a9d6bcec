"""Four-bit weights with a scale, and optionally an offset, for each group of consecutive inputs.

A 32-bit word holds eight numbers, and 16 words hold a tile of 128 inputs. Bits 4 k to 4 k + 3 of word j hold
input 32 k + 2 j, and bits 16 + 4 k to 19 + 4 k hold input 32 k + 2 j + 1. So four shifts of 16 words give the
adjacent pairs of inputs that bfloat16 product instructions take, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantization.hadamard import gain, transform
from pallas_kernels.quantization.host_memory import zeros

TILE, WORDS = 128, 16  # inputs that are packed together, and the words that they fill
GROUPS = 32, 64, 128  # supported numbers of inputs per scale; the first loses least
LOWEST, HIGHEST = -8, 7
E2M1 = 0, 1, 2, 3, 4, 6, 8, 12  # twice the magnitudes of the e2m1 format, by code; the fourth bit is the sign
KINDS = "int4", "e2m1"
SHRUNK = 1.0, 0.95, 0.9, 0.85, 0.8, 0.7  # shares of a group's largest magnitude that quantization tries
_E2M1_CODES = np.zeros(2 * E2M1[-1] + 1, np.int8)  # by value, from the lowest
_E2M1_CODES[np.add(E2M1, E2M1[-1])] = range(8)
_E2M1_CODES[np.subtract(E2M1[-1], E2M1[1:])] = range(9, 16)
SMALLEST = 1e-30  # lower bound of a group's largest magnitude, which may be 0
SCALES = 4  # the number of scales per row is a multiple of this

Try = tuple[jax.Array, jax.Array, jax.Array]  # squared errors, numbers, scales


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale", "offset"),
    meta_fields=("size", "group", "dtype", "kind", "hadamard", "inputs"),
)
@dataclass(frozen=True)
class Int4:
    """Represents number * scale + offset, with the Hadamard transform undone.

    Numbers are -8 to 7, or for kind e2m1 a signed value of E2M1. Inputs are divided into one part per device
    that shares them. Each part is padded to tiles; scales and offsets of padding are zero.

    Attributes:
        values: int32 [..., parts * words].
        scale: float32 [..., parts * groups].
        offset: as scale; None: all are zero.
        size: inputs per part.
        group: inputs per scale, one of GROUPS, or 16, for which Hopper has no kernel. A part's last group may
            have fewer.
        dtype: dtype of the represented array.
        kind: kind of the numbers, one of KINDS.
        hadamard: number of inputs per Hadamard transform, applied before quantization; 1: no transform.
        inputs: whether products quantize their other side too, row by row, to int8.
    """

    values: jax.Array
    scale: jax.Array
    offset: jax.Array | None
    size: int
    group: int = TILE
    dtype: str = "float32"
    kind: str = "int4"
    hadamard: int = 1
    inputs: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], self.values.shape[-1] // words(self.size) * self.size)

    def __getitem__(self, index: Any) -> Int4:
        """Indices of leading axes."""
        return self.map(lambda array: array[index])

    def dequantized(self) -> jax.Array:
        """The represented array [..., in]."""
        return transform(wide(self), self.hadamard).astype(self.dtype)

    def map(self, function: Any) -> Int4:
        """Returns the same weight with the function applied to each array."""
        offset = None if self.offset is None else function(self.offset)
        return replace(self, values=function(self.values), scale=function(self.scale), offset=offset)


def words(size: int) -> int:
    """Number of words for this many inputs."""
    return -(-size // TILE) * WORDS


def groups(size: int, group: int) -> int:
    """Number of scales for this many inputs, including those of padding."""
    return -(-(-(-size // TILE) * TILE // group) // SCALES) * SCALES


def pack(
    numbers: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None,
    *,
    group: int,
    parts: int = 1,
    dtype: str = "float32",
    kind: str = "int4",
    hadamard: int = 1,
    inputs: bool = False,
) -> Int4:
    """Packs numbers int8 [..., in] with scale and offset [..., in / group]; in / parts is a multiple of
    group.
    """
    size = numbers.shape[-1] // parts
    if kind == "e2m1":
        numbers = jnp.searchsorted(
            jnp.array(E2M1, jnp.int8), jnp.abs(numbers), method="compare_all"
        ) | jnp.where(numbers < 0, 8, 0)
    apart = jnp.pad(_parts(numbers, parts), _last(numbers, -size % TILE))
    # [..., parts, tiles, 4, words, 2]
    fields = apart.reshape(*apart.shape[:-1], -1, 4, WORDS, 2).astype(jnp.uint32) & 15
    shifts = 4 * jnp.arange(4, dtype=jnp.uint32)[:, None, None] + 16 * jnp.arange(2, dtype=jnp.uint32)
    packed = jax.lax.bitcast_convert_type((fields << shifts).sum((-3, -1), dtype=jnp.uint32), jnp.int32)
    form = group, dtype, kind, hadamard, inputs
    return _held(packed.reshape(*numbers.shape[:-1], -1), scale, offset, size, parts, *form)


def pack_on_host(
    numbers: np.ndarray,
    scale: np.ndarray,
    offset: np.ndarray | None,
    *,
    group: int,
    parts: int = 1,
    dtype: str = "float32",
    kind: str = "int4",
    hadamard: int = 1,
    inputs: bool = False,
) -> Int4:
    """`pack` with NumPy: no program is compiled. The result holds NumPy arrays."""
    size, leading = numbers.shape[-1] // parts, numbers.shape[:-1]
    if kind == "e2m1":
        numbers = _E2M1_CODES[numbers + E2M1[-1]]
    apart = _parts(numbers, parts)
    apart = np.ascontiguousarray(np.pad(apart, _last(numbers, -size % TILE)) if size % TILE else apart)
    pairs = apart.view(np.uint8).view("<u2").reshape(*leading, -1, 4, WORDS)  # two adjacent inputs each
    values = zeros((*pairs.shape[:-2], WORDS), np.uint32)
    for index in range(4):
        both = pairs[..., index, :].astype(np.uint32)
        values |= ((both & 0xF) | (both & 0xF00) << 8) << np.uint32(4 * index)
    form = group, dtype, kind, hadamard, inputs
    return _held(values.view(np.int32).reshape(*leading, -1), scale, offset, size, parts, *form)


def _held(values: Any, scale: Any, offset: Any, size: int, parts: int, group: int, *form: Any) -> Int4:
    """Packed values, with scales and offsets padded. Both are NumPy arrays, or both are JAX's."""
    pad: Any = np.pad if isinstance(scale, np.ndarray) else jnp.pad

    def padded(by_group: Any) -> Any:
        apart = _parts(by_group.astype(np.float32), parts)
        missing = groups(size, group) - apart.shape[-1]
        return (pad(apart, _last(by_group, missing)) if missing else apart).reshape(*by_group.shape[:-1], -1)

    return Int4(values, padded(scale), None if offset is None else padded(offset), size, group, *form)


def quantize_int4(
    x: jax.Array, *, group: int = GROUPS[0], parts: int = 1, hadamard: int = 1, inputs: bool = False
) -> Int4:
    """Quantizes floats x [..., in], rounding each group to nearest. There are no offsets: groups of half the
    size lose less and take the same memory.
    """
    size = x.shape[-1] // parts
    missing = -size % group
    apart = _parts(transform(x.astype(jnp.float32), hadamard) / gain(hadamard), parts)
    rows = jnp.pad(apart, _last(x, missing), mode="edge").reshape(*apart.shape[:-1], -1, group)
    numbers, scale = fit(rows, by_magnitude=hadamard == 1)
    numbers = numbers.astype(jnp.int8).reshape(*apart.shape[:-1], -1)[..., :size].reshape(x.shape)
    options: Any = {"group": group, "parts": parts, "hadamard": hadamard, "inputs": inputs}
    return pack(numbers, scale.reshape(*x.shape[:-1], -1), None, dtype=str(x.dtype), **options)


def fit(rows: jax.Array, *, by_magnitude: bool = False) -> tuple[jax.Array, jax.Array]:
    """Quantizes groups float32 [..., group]: tries several scales and takes the least squared error.

    Args:
        by_magnitude: squared errors are weighted by magnitudes. Of weights that are not transformed, the
            largest matter most: their error is larger, but a model's perplexity lower.

    Returns:
        Numbers as floats, [..., group], and scale, [..., 1].
    """
    low, high = rows.min(-1, keepdims=True), rows.max(-1, keepdims=True)
    largest = jnp.where(high > -low, jnp.maximum(high, SMALLEST), jnp.minimum(low, -SMALLEST))
    part = jnp.abs(rows / largest)
    weight = part + jnp.sqrt((part**2).mean(-1, keepdims=True)) if by_magnitude else jnp.ones_like(rows)

    def tried(shrunk: jax.Array) -> Try:
        scale = shrunk * largest / LOWEST  # numbers reach further below zero than above
        numbers = jnp.clip(jnp.round(rows / scale), LOWEST, HIGHEST)
        # The scale that fits these numbers best.
        weighted = weight * numbers
        square = (weighted * numbers).sum(-1, keepdims=True)
        best = (weighted * rows).sum(-1, keepdims=True) / jnp.maximum(square, SMALLEST)
        scale = jnp.where(square > 0, best, scale)
        return (weight * (numbers * scale - rows) ** 2).sum(-1, keepdims=True), numbers, scale

    def better(best: Try, shrunk: jax.Array) -> tuple[Try, None]:
        error = tried(shrunk)
        return jax.tree.map(lambda new, old: jnp.where(error[0] < best[0], new, old), error, best), None

    (_, numbers, scale), _ = jax.lax.scan(
        better, tried(jnp.float32(SHRUNK[0])), jnp.array(SHRUNK[1:], jnp.float32)
    )
    return numbers, scale


def wide(x: Int4) -> jax.Array:
    """float32 [..., in]: the weights for transformed inputs."""
    bits = _parts(x.values, x.values.shape[-1] // words(x.size))
    bits = bits.reshape(*bits.shape[:-1], -1, 1, WORDS, 1)
    shifts = 4 * jnp.arange(4)[:, None, None] + 16 * jnp.arange(2)
    numbers = (bits << (28 - shifts)) >> 28  # [..., parts, tiles, 4, words, 2]
    if x.kind == "e2m1":
        code = numbers & 7
        magnitude = code + jnp.maximum(code - 4, 0) + 2 * jnp.maximum(code - 6, 0)
        numbers = jnp.where(numbers < 0, -magnitude, magnitude)
    leading = numbers.shape[:-4]
    numbers = numbers.reshape(*leading, -1, x.group).astype(jnp.float32)

    def spread(by_group: jax.Array) -> jax.Array:
        return _parts(by_group, leading[-1])[..., : numbers.shape[-2], None]

    weights = numbers * spread(x.scale)
    if x.offset is not None:
        weights = weights + spread(x.offset)
    return weights.reshape(*leading, -1)[..., : x.size].reshape(x.shape)


def _parts[A: (jax.Array, np.ndarray)](x: A, parts: int) -> A:
    return x.reshape(*x.shape[:-1], parts, -1)


def _last(x: jax.Array | np.ndarray, missing: int) -> list[tuple[int, int]]:
    """Padding of the last axis by `missing`, for x with its last axis divided into parts."""
    return [(0, 0)] * x.ndim + [(0, missing)]
