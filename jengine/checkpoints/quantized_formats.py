"""Quantized checkpoints in Hugging Face's layout with a quantization_config: AWQ, GPTQ, compressed-tensors,
FP8, MXFP4.

All are read into `stored.GroupedValues`. Products that quantize their inputs find the
scales themselves: stored ones are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jengine.base.errors import ModelError
from jengine.checkpoints.quantization_config import config_groups
from jengine.checkpoints.stored import GroupedValues, StoredTensor, Tensor, dense
from pallas_kernels.quantization.int4 import E2M1

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each field of a word
ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale")  # settings for quantized activations
PARTS = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv",
    "weight_zero_point", "weight_g_idx",
)  # fmt: skip


def read_quantized(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Replaces the tensors of each quantized module by a single `weight`.

    Raises:
        ModelError: a tensor is missing.
    """
    if config["quant_method"] == "mxfp4":
        return _mxfp4(tensors)
    modules: dict[str, dict[str, Tensor]] = {}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in PARTS:
            modules.setdefault(module, {})[part] = tensor
        elif part not in (*ACTIVATIONS, "weight_shape"):
            out[name] = tensor
    readers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "fp8": _scaled}
    for module, parts in modules.items():
        name = f"{module}.weight"
        if name in out:
            parts["weight"] = out[name]
        file = next(iter(parts.values())).file
        try:
            out[name] = Tensor(
                file,
                readers[config["quant_method"]](
                    {part: _array(tensor) for part, tensor in parts.items()}, config
                ),
            )
        except KeyError as missing:
            raise ModelError("is missing", file=file, tensor=f"{module}.{missing.args[0]}") from None
    return out


def _array(tensor: Tensor) -> np.ndarray:
    assert not isinstance(tensor.array, StoredTensor)
    return dense(tensor.array)


def _awq(parts: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> StoredTensor:
    words, zeros, scales = parts["qweight"], parts.get("qzeros"), parts["scales"]
    shape = words.shape[1] * 8, words.shape[0]

    def fields(words: np.ndarray) -> np.ndarray:  # [rows, columns]
        apart = _fields(words, 4)
        return np.asarray(apart[..., np.argsort(AWQ_ORDER)].reshape(words.shape[0], -1))

    return _by_input(shape, lambda: fields(words), scales, lambda: 8 if zeros is None else fields(zeros), 8)


def _gptq(parts: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> StoredTensor:
    bits = int(config["bits"])
    words, zeros, scales, index = parts["qweight"], parts["qzeros"], parts["scales"], parts.get("g_idx")
    each = 32 // bits
    shape = words.shape[1], words.shape[0] * each
    one = int(config.get("checkpoint_format", "gptq") == "gptq")  # this format stores zero points minus one

    def numbers() -> np.ndarray:
        return np.asarray(_fields(words, bits).transpose(0, 2, 1).reshape(shape[1], shape[0]))

    def zero_points() -> np.ndarray:
        return np.asarray((_fields(zeros, bits).reshape(zeros.shape[0], -1) + one) & (2**bits - 1))

    return _by_input(shape, numbers, scales, zero_points, 2 ** (bits - 1), index)


def _by_input(
    shape: tuple[int, int],
    numbers: Callable[[], np.ndarray],
    scales: np.ndarray,
    zeros: Callable[[], Any],
    middle: int,
    index: np.ndarray | None = None,
) -> StoredTensor:
    """A tensor of unsigned numbers [in, out] with scales and zero points [groups, out]. index: the group of
    each input.
    """
    group = -(-shape[1] // scales.shape[0])

    def read() -> GroupedValues:
        scale = scales.astype(np.float32)
        offset = (middle - zeros()) * scale
        per_group = group
        if index is not None and not np.array_equal(index, np.arange(shape[1]) // group):
            scale, offset, per_group = scale[index], offset[index], 1
        values = (numbers() - middle).astype(np.int8)
        return GroupedValues(
            np.ascontiguousarray(values.T), scale.T, offset.T if offset.any() else None, (1, per_group)
        )

    return StoredTensor(shape, read)


def _compressed(parts: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> StoredTensor:
    if "weight_packed" not in parts:
        return _scaled(parts, config)
    bits = next(group["weights"]["num_bits"] for group in config_groups(config))
    words, scale, zeros, index = (
        parts.get(name) for name in ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
    )
    if words is None or scale is None:
        raise KeyError("weight_scale")
    middle = 2 ** (bits - 1)
    shape = words.shape[0], words.shape[1] * 32 // bits

    def read() -> GroupedValues:
        wide, group = scale.astype(np.float32), shape[1] // scale.shape[1]
        offset = None
        if zeros is not None:  # words hold the zero points of consecutive outputs
            points = _fields(zeros, bits).transpose(0, 2, 1).reshape(-1, zeros.shape[1])[: shape[0]] - middle
            offset = -points * wide
        if index is not None and not np.array_equal(index, np.arange(shape[1]) // group):
            wide, offset, group = wide[:, index], None if offset is None else offset[:, index], 1
        values = (_fields(words, bits).reshape(shape) - middle).astype(np.int8)
        return GroupedValues(values, wide, offset, (1, group))

    return StoredTensor(shape, read)


def _scaled(parts: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> StoredTensor:
    """Eight-bit numbers with one scale, or with a scale for each output or each block."""
    values = parts["weight"]
    scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    zeros = parts.get("weight_zero_point")
    block = config.get("weight_block_size")
    for group in config_groups(config):
        block = block or group["weights"].get("block_structure")
    rows, columns = values.shape

    def read() -> GroupedValues:
        wide = scale.astype(np.float32).reshape(
            scale.shape[0] if scale.ndim == 2 else -1, scale.shape[1] if scale.ndim == 2 else 1
        )
        each = -(-rows // wide.shape[0]), -(-columns // wide.shape[1])
        if block and wide.shape == (-(-rows // block[0]), -(-columns // block[1])):
            each = int(block[0]), int(block[1])  # the last blocks may be smaller
        offset = None if zeros is None else -zeros.astype(np.float32).reshape(wide.shape) * wide
        return GroupedValues(values, wide, offset, each)

    return StoredTensor((rows, columns), read)


def _mxfp4(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replaces experts' blocks, uint8 [experts, out, in / 32, 16], and scales, uint8 [experts, out, in / 32],
    by their weights."""
    out = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name, tensor in tensors.items():
        weight, _, part = name.rpartition("_")
        if part == "blocks":
            if f"{weight}_scales" not in tensors:
                raise ModelError("is missing", file=tensor.file, tensor=f"{weight}_scales")
            out[weight] = Tensor(tensor.file, _Experts(_array(tensor), _array(tensors[f"{weight}_scales"])))
    return out


class _Experts(StoredTensor):
    """Weights [experts, in, out] in MXFP4, with groups as for [experts * out, in]."""

    def __init__(self, blocks: np.ndarray, scales: np.ndarray) -> None:
        experts, outs = blocks.shape[:2]
        inputs = math.prod(blocks.shape[2:]) * 2
        table = np.array([*E2M1, *(-n for n in E2M1)], np.int8)

        def read() -> GroupedValues:
            bytes_ = blocks.reshape(experts * outs, -1)
            values = table[np.stack([bytes_ & 15, bytes_ >> 4], axis=-1)].reshape(experts * outs, inputs)
            # the numbers are stored doubled
            halved = np.ldexp(np.float32(1), scales.reshape(experts * outs, -1).astype(np.int32) - 128)
            return GroupedValues(values, halved.astype(np.float32), None, (1, inputs // scales.shape[-1]))

        super().__init__((experts, inputs, outs), read)

    def dense(self) -> np.ndarray:
        experts, inputs, outs = self.shape
        return super().dense().reshape(experts, outs, inputs).swapaxes(1, 2)


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned fields of words, the lowest first: int32 [..., 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)).astype(np.int32)
