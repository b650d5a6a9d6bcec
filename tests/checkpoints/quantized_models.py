"""Tiny models quantized in the layouts of AWQ, GPTQ, compressed-tensors, FP8 and NVFP4, packed according to
each format's description."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jengine.checkpoints.safetensors import READABLE
from tests.golden.weights import VARIANTS, weights

Tensors = dict[str, np.ndarray]
# a weight to the tensors of its module, and to what they stand for
Quantizer = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]
VARIANT, EVEN = "llama_gqa", {"intermediate_size": 128}
LINEAR = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
CODES = {dtype: code for code, dtype in READABLE.items()}


def write_quantized(
    folder: Path,
    quantization: dict[str, Any],
    quantizer: Quantizer,
    plain: tuple[str, ...] = (),
    **fields: Any,
) -> Tensors:
    """Writes a model. Returns the unquantized values of every weight. plain: suffixes of names that stay
    unquantized.
    """
    config = {**VARIANTS[VARIANT], **EVEN, **fields, "quantization_config": quantization}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors, out = {}, {}
    for name, weight in weights(VARIANT, config).items():
        out[name] = tensors[name] = weight
        if name.endswith(LINEAR) and not (plain and name.endswith(plain)):
            del tensors[name]
            parts, out[name] = quantizer(weight)
            tensors |= {f"{name.removesuffix('weight')}{part}": array for part, array in parts.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    return out


def write_safetensors(file: Path, tensors: Tensors) -> None:
    """Writes safetensors with bfloat16 and float8, which the numpy part of the package does not support."""
    header, body = {}, b""
    for name, array in tensors.items():
        header[name] = {
            "dtype": CODES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + array.nbytes],
        }
        body += array.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def grouped(
    weight: np.ndarray, group: int, levels: int, *, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned numbers [out, in], float16 scales and zero points [out, groups]."""
    rows = weight.reshape(weight.shape[0], -1, group)
    low, high = rows.min(-1), rows.max(-1)
    if symmetric:
        scale, zero = 2 * np.maximum(-low, high) / (levels - 1), np.full(low.shape, levels // 2)
    else:
        scale = (high - low) / (levels - 1)
        zero = np.clip(np.round(-low / scale), 0, levels - 1).astype(int)
    scale = scale.astype(np.float16)
    numbers = np.clip(np.round(rows / scale.astype(np.float32)[..., None]) + zero[..., None], 0, levels - 1)
    return numbers.reshape(weight.shape).astype(int), scale, zero


def dense(numbers: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    group = numbers.shape[1] // scale.shape[1]
    wide, points = (np.repeat(x, group, 1) for x in (scale.astype(np.float32), zero))
    return ((numbers - points) * wide).astype(np.float32)


def packed(numbers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Consecutive numbers of an axis in int32 words; field i holds number order[i] of its word."""
    each = 32 // bits
    moved = np.moveaxis(numbers, axis, -1)
    missing = -moved.shape[-1] % each
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, missing)])
    words = np.zeros((*moved.shape[:-1], moved.shape[-1] // each), np.uint32)
    for field, number in enumerate(order or range(each)):
        words |= moved[..., number::each].astype(np.uint32) << np.uint32(bits * field)
    return np.ascontiguousarray(np.moveaxis(words.view(np.int32), -1, axis))


def awq(group: int) -> Quantizer:
    def quantizer(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        numbers, scale, zero = grouped(weight, group, 16, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {
            "qweight": packed(numbers.T, 4, 1, order),
            "qzeros": packed(zero.T, 4, 1, order),
            "scales": np.ascontiguousarray(scale.T),
        }
        return parts, dense(numbers, scale, zero)

    return quantizer


def gptq(group: int, bits: int, *, symmetric: bool, shuffled: bool = False, v2: bool = False) -> Quantizer:
    """shuffled: whether inputs belong to groups in another order."""

    def quantizer(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        size = weight.shape[1]
        order = np.random.default_rng(0).permutation(size) if shuffled else np.arange(size)
        numbers, scale, zero = grouped(weight[:, order], group, 2**bits, symmetric=symmetric)
        if not v2:
            zero = np.maximum(zero, 1)
        wide, back = dense(numbers, scale, zero), np.argsort(order)
        parts = {
            "qweight": packed(numbers[:, back].T, bits, 0),
            "qzeros": packed((zero if v2 else zero - 1).T, bits, 1),
            "scales": np.ascontiguousarray(scale.T),
            "g_idx": (back // group).astype(np.int32),
        }
        return parts, wide[:, back]

    return quantizer


def packed_tensors(group: int, *, symmetric: bool) -> Quantizer:
    """compressed-tensors' W4A16."""

    def quantizer(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        numbers, scale, zero = grouped(weight, group, 16, symmetric=symmetric)
        parts = {
            "weight_packed": packed(numbers, 4, 1),
            "weight_scale": scale.astype(np.float32).astype(ml_dtypes.bfloat16),
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            parts["weight_zero_point"] = packed(zero, 4, 0)
        return parts, dense(numbers, parts["weight_scale"], zero)

    return quantizer


def int8(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors' W8A8: a scale for each output."""
    scale = (np.abs(weight).max(1, keepdims=True) / 120).astype(np.float32)
    values = np.round(weight / scale).astype(np.int8)
    return {"weight": values, "weight_scale": scale}, values * scale


def nvfp4(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """Model Optimizer's: pairs of numbers in bytes, a float8 scale for each 16 inputs, and a float32 one."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    rows = weight.reshape(len(weight), -1, 16)
    shared = np.float32(np.abs(weight).max() / (6 * 448))
    scale = np.maximum(np.abs(rows).max(-1) / 6 / shared, 2**-9).astype(ml_dtypes.float8_e4m3fn)
    wide = scale.astype(np.float32)[..., None] * shared
    codes = np.abs(np.abs(rows / wide)[..., None] - magnitudes).argmin(-1)
    values = np.where(rows < 0, -1, 1) * magnitudes[codes] * wide
    codes = (codes + 8 * (rows < 0)).reshape(weight.shape).astype(np.uint8)
    parts = {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_scale_2": np.array(shared),
        "input_scale": np.ones((), np.float32),
        "k_scale": np.ones((), np.float32),
    }
    return parts, values.reshape(weight.shape).astype(np.float32)


def fp8(scales: str, name: str = "weight_scale", block: int = 48, inputs: str = "input_scale") -> Quantizer:
    """scales: all, outputs, or square blocks. name, inputs: of the tensors of scales."""

    def quantizer(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        rows, columns = weight.shape
        if scales == "blocks":
            starts = [range(0, size, block) for size in (rows, columns)]
            scale = np.array(
                [[np.abs(weight[i : i + block, j : j + block]).max() for j in starts[1]] for i in starts[0]]
            )
            wide = np.repeat(np.repeat(scale, block, 0), block, 1)[:rows, :columns]
        else:
            scale = (
                np.abs(weight).max(1, keepdims=True)
                if scales == "outputs"
                else np.abs(weight).max().reshape(1)
            )
            wide = np.broadcast_to(scale.reshape(-1, 1), weight.shape)
        scale, wide = (scale / 448).astype(np.float32), (wide / 448).astype(np.float32)
        values = (weight / wide).astype(ml_dtypes.float8_e4m3fn)
        parts = {"weight": values, name: scale, inputs: np.ones(1, np.float32)}
        return parts, values.astype(np.float32) * wide

    return quantizer
