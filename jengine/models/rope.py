"""Rotary position embedding, and its scaling to contexts longer than the trained one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jengine.models.config import ModelConfig, RopeScaling
from pallas_kernels.elementwise.rotary import Rotation


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies as plain numbers, so that programs contain them as constants and do not close over
    arrays.
    """

    frequencies: tuple[float, ...]  # radians per token; channel i rotates with channel i + rotary_dim / 2
    magnitude: float = 1.0  # factor of cos and sin (yarn, longrope)
    axes: tuple[int, ...] = ()  # for each frequency: which number of a position it turns with

    def cos_sin(self, positions: jax.Array) -> Rotation:
        """cos and sin for positions int32[N], or int32[axes, N], for `rotate`."""
        places = positions[:, None] if positions.ndim == 1 else positions[jnp.array(self.axes)].T
        angles = places.astype(jnp.float32) * jnp.array(self.frequencies, jnp.float32)
        return jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude


def rope(config: ModelConfig, max_model_len: int) -> Rope:
    """The model's rotary embedding, of positions with one number or, in models with mrope, three."""
    out, sections = _rope(config, max_model_len), config.rope.sections
    return replace(out, axes=_axes(sections, config.rope.interleaved)) if sections else out


def _axes(sections: tuple[int, ...], interleaved: bool) -> tuple[int, ...]:
    """The number of a position with which each frequency turns: one after the other, or in turn until each
    has as many as its section says, with the first for the rest.
    """
    if not interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    in_turn = ((i % 3, i // 3) for i in range(sum(sections)))
    return tuple(axis if place < sections[axis] else 0 for axis, place in in_turn)


def _rope(config: ModelConfig, max_model_len: int) -> Rope:
    """The model's frequencies, by the formulas of transformers' modeling_rope_utils.

    Dynamic scaling and longrope are fixed for sequences of max_model_len tokens, so a token's result depends
    neither on the batch nor on the current length of its sequence. Within the trained context, dynamic
    scaling has no effect.
    """
    dim, theta, scaling = config.rope.dim or config.head_dim, config.rope.theta, config.rope.scaling
    if scaling is None:
        return Rope(_powers(theta, dim))
    if scaling.kind == "linear":
        return Rope(tuple(f / scaling.factor for f in _powers(theta, dim)))
    if scaling.kind == "dynamic":
        stretch = max(max_model_len, config.max_position) / config.max_position
        theta *= (scaling.factor * stretch - (scaling.factor - 1)) ** (dim / (dim - 2))
        return Rope(_powers(theta, dim))
    if scaling.kind == "llama3":
        return Rope(tuple(_llama3(f, scaling) for f in _powers(theta, dim)))
    if scaling.kind == "longrope":
        return _longrope(theta, dim, scaling, max_model_len)
    if scaling.kind == "proportional":
        pairs = int(scaling.share * dim // 2)
        return Rope(
            tuple(f / scaling.factor for f in _powers(theta, dim)[:pairs]) + (0.0,) * (dim // 2 - pairs)
        )
    return _yarn(theta, dim, scaling)


def local_rope(config: ModelConfig, max_model_len: int) -> Rope:
    """Frequencies of layers with a window: of `rope.local_theta`, without scaling, if there is one; else the
    model's.
    """
    if config.rope.local_theta is None:
        return rope(config, max_model_len)
    return Rope(_powers(config.rope.local_theta, config.rope.dim or config.head_dim))


def _powers(theta: float, dim: int) -> tuple[float, ...]:
    return tuple(theta ** (-i / dim) for i in range(0, dim, 2))


def _llama3(frequency: float, s: RopeScaling) -> float:
    """Keeps high frequencies, divides low ones by the factor, and interpolates between them."""
    turns = s.original_max_position * frequency / (2 * math.pi)  # within the trained context
    if turns > s.high_freq_factor:
        return frequency
    if turns < s.low_freq_factor:
        return frequency / s.factor
    share = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1 - share) * frequency / s.factor + share * frequency


def _yarn(theta: float, dim: int, s: RopeScaling) -> Rope:
    """YaRN (Peng et al. 2023): a linear ramp over channels between original and scaled frequencies."""

    def channel(turns: float) -> float:
        """The channel that makes this many turns within the trained context."""
        return dim * math.log(s.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(s.beta_fast), channel(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    stretched = [min(max((i - low) / span, 0.0), 1.0) for i in range(dim // 2)]
    frequencies = tuple(
        f / s.factor * r + f * (1 - r) for f, r in zip(_powers(theta, dim), stretched, strict=True)
    )
    return Rope(frequencies, yarn_magnitude(s))


def yarn_magnitude(s: RopeScaling) -> float:
    """What YaRN multiplies cos and sin by."""

    def mscale(weight: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * weight * math.log(s.factor) + 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return mscale(s.mscale) / mscale(s.mscale_all_dim)
    return mscale(1.0)


def _longrope(theta: float, dim: int, s: RopeScaling, max_model_len: int) -> Rope:
    """LongRoPE (Ding et al. 2024): a factor per frequency, from one of two lists."""
    beyond = max_model_len > s.original_max_position
    factors, magnitude = (s.long_factor, s.long_mscale) if beyond else (s.short_factor, s.short_mscale)
    magnitude = s.attention_factor if magnitude is None else magnitude
    if magnitude is None:
        magnitude = (
            1.0 if s.factor <= 1 else math.sqrt(1 + math.log(s.factor) / math.log(s.original_max_position))
        )
    return Rope(tuple(f / factor for f, factor in zip(_powers(theta, dim), factors, strict=True)), magnitude)
