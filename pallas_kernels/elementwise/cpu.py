"""Rotary embedding, gates and norms on a CPU. XLA's loops for bfloat16 are two to five times as slow, and its
norms are four loops.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.llvm import native
from pallas_kernels.llvm.calls import call, functions, register
from pallas_kernels.llvm.code import Code, share, write_parts
from pallas_kernels.llvm.formats import SIZES, processor
from pallas_kernels.llvm.kinds import INPUTS
from pallas_kernels.llvm.math import LARGEST_POWER, LOG2_E, power_of_two, rounded
from pallas_kernels.llvm.types import F32, I16, I32, LANES, vector
from pallas_kernels.llvm.values import Value

GATES = "silu", "gelu_tanh"
ALONE = (1 << 14) - 1  # numbers up to which one thread is as fast as several
GELU = 2 * (2 / 3.141592653589793) ** 0.5, 0.044715  # gelu(x) is about x * sigmoid(a * (x + b * x ** 3))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate as `rotary.rotate_by_xla` does, for arguments that `rotates` accepts.

    Args:
        x: bfloat16 or float32 [tokens, heads, head_dim].
        cos, sin: float32 [tokens, pairs].
    """
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    y: jax.Array = call(_register("rotate", str(x.dtype)), out, x, cos, sin)
    return y


def rotate_qkv(rows: jax.Array, group: int, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rotated queries [tokens, heads, head_dim] and keys [tokens, kv_heads, head_dim], as `rotate`.

    Args:
        rows, group: as in `qkv.QkvProduct`.
    """
    tokens, kv_heads, _, dim = rows.shape
    shapes = [
        jax.ShapeDtypeStruct((tokens, heads, dim), rows.dtype) for heads in (kv_heads * group, kv_heads)
    ]
    q, k = call(_register("rotate_qkv", str(rows.dtype)), shapes, rows, cos, sin)
    return q, k


def rotates(dtype: str, head_dim: int, pairs: int) -> bool:
    """Whether `rotate` supports these: at least a vector of pairs, and none or a vector of other channels."""
    return dtype in INPUTS and pairs >= LANES and not 0 < head_dim - 2 * pairs < LANES


def gated(gate_up: jax.Array, activation: str) -> jax.Array:
    """activation(gate) * up in float32, rounded once.

    Args:
        gate_up: [rows, size, 2], accepted by `gates`; each gate is next to its factor.
        activation: one of GATES.
    """
    out = jax.ShapeDtypeStruct(gate_up.shape[:-1], gate_up.dtype)
    y: jax.Array = call(_register(activation, str(gate_up.dtype)), out, gate_up)
    return y


def gates(gate_up: jax.Array) -> bool:
    """Whether `gated` supports this: at least a vector of gates."""
    return str(gate_up.dtype) in INPUTS and gate_up.size >= 2 * LANES


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float) -> jax.Array:
    """Normalize as `qkv.rms_norm` does, for arguments that `norms` accepts."""
    options = jnp.array([eps, offset], jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    out = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    y: jax.Array = call(_register("norm", str(x.dtype)), out, rows, weight, options)
    return y.reshape(x.shape)


def norms(x: jax.Array, weight: jax.Array) -> bool:
    """Whether `rms_norm` supports these: of one dtype, and at least a vector of channels."""
    return str(x.dtype) in INPUTS and weight.dtype == x.dtype and x.shape[-1] >= LANES and x.size > 0


def prepare(dtype: str) -> None:
    """Registers the kernels for activations of this dtype, and norms of any dtype, since models may compute
    some in float32.
    """
    if dtype in INPUTS:
        for what in "rotate", "rotate_qkv", *GATES:
            _register(what, dtype)
        for kind in INPUTS:
            _register("norm", kind)


def source(target: native.Target, what: str, dtype: str) -> str:
    """The source of a module with the function `compute` of (frame, part, parts), and `parts`, the number of
    these.
    """
    code = Code()
    arrays = _Arrays(code, dtype, processor(target).pairs and target.architecture == "x86")
    write, axes = {"rotate": (_rotate, 3), "rotate_qkv": (_rotate_qkv, 4), "norm": (_norm, 2)}.get(
        what, (_gate, 3)
    )
    write(arrays, what)
    write_parts(code, "parts", axes, ALONE)
    return code.text()


def _register(what: str, dtype: str) -> str:
    name = f"jengine_{what}_{dtype}"

    def make() -> list[int | tuple[int, int]]:
        return functions(name, lambda: source(native.host(), what, dtype), ("compute", "parts"))

    return register(name, make)


class _Arrays:
    """Arguments and result in XLA's call frame. Numbers are read and written 16 at a time, as float32."""

    def __init__(self, code: Code, dtype: str, converts: bool) -> None:
        self.code, self.dtype, self.size, self._converts = code, dtype, SIZES[dtype], converts
        self.frame, *self.part = code.kernel("compute")  # and how many there are
        self.out, _ = code.result(self.frame, 0)

    def raw(self, place: Value) -> Value:
        """Loads numbers without conversion."""
        return self.code.load(vector(I16 if self.size == 2 else I32), place)

    def read(self, place: Value) -> Value:
        raw = self.raw(place)
        return ((raw.unsigned_to(vector(I32)) << 16) if self.size == 2 else raw).bits(vector(F32))

    def read_one(self, place: Value) -> Value:
        """Loads one number."""
        if self.size == 4:
            return self.code.load(F32, place)
        return (self.code.load(I16, place).unsigned_to(I32) << 16).bits(F32)

    def write(self, real: Value, place: Value) -> None:
        self.code.store(rounded(self.code, real, self._converts) if self.size == 2 else real, place)


def _rotate(arrays: _Arrays, _: str) -> None:
    code, (x, shape) = arrays.code, arrays.code.argument(arrays.frame, 0)
    tokens, heads, dim = (code.word(shape, axis) for axis in range(3))
    with code.loop(*share(tokens, *arrays.part)) as token, code.loop(0, heads) as head:
        base = (token * heads + head) * dim * arrays.size
        _rotate_head(arrays, token, dim, x + base, arrays.out + base)


def _rotate_qkv(arrays: _Arrays, _: str) -> None:
    code, size, (x, shape) = arrays.code, arrays.size, arrays.code.argument(arrays.frame, 0)
    (q, q_shape), (k, _shape) = (code.result(arrays.frame, n) for n in range(2))
    tokens, kv_heads, each, dim = (code.word(shape, axis) for axis in range(4))
    group = code.word(q_shape, 1) // kv_heads
    with (
        code.loop(*share(tokens, *arrays.part)) as token,
        code.loop(0, kv_heads) as kv_head,
        code.loop(0, group + 1) as head,
    ):
        kv_row = token * kv_heads + kv_head
        target = (head < group).choose(q + (kv_row * group + head) * dim * size, k + kv_row * dim * size)
        _rotate_head(arrays, token, dim, x + (kv_row * each + head) * dim * size, target)


def _rotate_head(arrays: _Arrays, token: Value, dim: Value, source: Value, target: Value) -> None:
    code, size = arrays.code, arrays.size
    (cos, angles), (sin, _) = (code.argument(arrays.frame, n) for n in (1, 2))
    pairs = code.word(angles, 1)
    with code.loop(0, pairs, LANES) as lane:
        at = lane.least(pairs - LANES)  # the last vector starts earlier instead of ending later
        c, s = (code.load(vector(F32), angle + (token * pairs + at) * 4) for angle in (cos, sin))
        low, high = at * size, (pairs + at) * size
        first, second = arrays.read(source + low), arrays.read(source + high)
        arrays.write(first * c - second * s, target + low)
        arrays.write(second * c + first * s, target + high)
    with code.loop(pairs * 2, dim, LANES) as channel:
        place = channel.least(dim - LANES) * size
        code.store(arrays.raw(source + place), target + place)


def _norm(arrays: _Arrays, _: str) -> None:
    code, size = arrays.code, arrays.size
    (x, shape), (weight, _shape), (options, _length) = (code.argument(arrays.frame, n) for n in range(3))
    rows, count = (code.word(shape, axis) for axis in range(2))
    eps, offset = (code.load(F32, options + 4 * n) for n in range(2))
    whole = count // LANES * LANES
    with code.loop(*share(rows, *arrays.part)) as row:
        base = row * count * size
        lanes = code.variable(code.constant(vector(F32), 0.0))
        with code.loop(0, whole, LANES) as n:
            numbers = arrays.read(x + base + n * size)
            lanes.set(code.fma(numbers, numbers, lanes.get()))
        total = code.variable(code.sum(lanes.get()))
        with code.loop(whole, count) as n:
            number = arrays.read_one(x + base + n * size)
            total.set(number * number + total.get())
        root = code.intrinsic("sqrt", total.get() / count.to(F32) + eps)
        scale = (1.0 / root).splat()
        with code.loop(0, count, LANES) as n:
            at = n.least(count - LANES) * size  # the last vector starts earlier instead of ending later
            arrays.write(
                arrays.read(x + base + at) * scale * (arrays.read(weight + at) + offset.splat()),
                arrays.out + base + at,
            )


def _gate(arrays: _Arrays, activation: str) -> None:
    code, size, (x, shape) = arrays.code, arrays.size, arrays.code.argument(arrays.frame, 0)
    count = code.word(shape, 0) * code.word(shape, 1)
    with code.loop(*share((count + (LANES - 1)) // LANES, *arrays.part)) as n:
        at = (n * LANES).least(count - LANES)
        place = x + at * (2 * size)
        if size == 2:
            both = code.load(vector(I32), place)
            gate, up = (both << 16).bits(vector(F32)), (both & -(1 << 16)).bits(vector(F32))
        else:
            low, high = (code.load(vector(F32), place + 64 * half) for half in range(2))
            gate, up = (low.shuffled(high, range(odd, 2 * LANES, 2)) for odd in range(2))
        slope, bend = (1.0, 0.0) if activation == "silu" else GELU
        turned = gate * -(slope * LOG2_E)
        turned = turned if bend == 0.0 else turned * (gate * gate * bend + 1.0)
        arrays.write(
            gate / (power_of_two(code, turned.least(LARGEST_POWER)) + 1.0) * up, arrays.out + at * size
        )
