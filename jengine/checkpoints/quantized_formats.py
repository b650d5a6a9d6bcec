"""Quantized checkpoints in Hugging Face's layout with a quantization_config: AWQ, GPTQ, compressed-tensors,
FP8, MXFP4, and Model Optimizer's NVFP4 and FP8.

The configuration says how weights are stored, and in which form they are kept in memory. Tensors are read
into `stored.GroupedValues`. Products that quantize their inputs find the scales themselves: stored ones are
not read.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jengine.base.errors import ModelError
from jengine.base.model_files import malformed, read_object
from jengine.checkpoints.stored import GroupedValues, StoredTensor, Tensor, dense
from jengine.models.config import StoredWeights
from pallas_kernels.quantization.formats import FP8
from pallas_kernels.quantization.int4 import E2M1, GROUPS
from pallas_kernels.quantization.quantized import GROUP

log = logging.getLogger("jengine")
LARGEST_SCALE = 127 + 65  # of MXFP4, as a biased exponent
METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")
# of compressed-tensors
FORMATS = (
    "dense", "float-quantized", "int-quantized", "mxfp4-pack-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "pack-quantized",
)  # fmt: skip
ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")  # of Model Optimizer
OPTIMIZER_FILE = "hf_quant_config.json"  # Model Optimizer's settings; up to 0.29, config.json has none
# settings of input_activations, and activation_scheme of FP8
INPUTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4, 8),
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "token", "group", "block", "tensor_group"),
    "dynamic": (False, True, "local", None),
}
SCHEMES = ("dynamic", "static", None)
# that products apply, each with a scale for each row: no coarser, and found from the row itself
BY_ROW = ("dynamic by token", "dynamic by tensor", "static by token", "static by tensor")
Group = dict[str, Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each field of a word
SHUFFLED = ("group", "dynamic", True)  # values of actorder for groups of inputs that are not consecutive
TEXT_PARTS = r"(?:(?:model|language_model|text_model)\.)*"  # before the name of a module of the text model
# settings for quantized activations
ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "input_global_scale", "activation_scale")
CACHES = ("k_scale", "v_scale")  # settings for quantized caches
PARTS = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv",
    "weight_zero_point", "weight_g_idx", "weight_global_scale", "weight_scale_2",
)  # fmt: skip


def read_fields(folder: Path) -> dict[str, Any]:
    """The fields of a folder's config.json. Its quantization_config may be in OPTIMIZER_FILE alone.

    Raises:
        ModelError: a file is missing or malformed.
    """
    fields, file = read_object(folder / "config.json"), folder / OPTIMIZER_FILE
    if not file.exists() or fields.get("quantization_config") or fields.get("compression_config"):
        return fields
    with malformed(file):
        settings = read_object(file)["quantization"]
        if settings.get("quant_algo") is None:  # of a cache alone, or of nothing
            return fields
        config = {"quant_algo": settings["quant_algo"], "group_size": settings.get("group_size")}
        config |= {"quant_method": "modelopt", "ignore": settings.get("exclude_modules")}
    return {**fields, "quantization_config": config}


def quantization_config(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization_config among a config.json's fields.

    Raises:
        ModelError: it is not supported.
    """
    config = fields.get("quantization_config") or fields.get("compression_config")
    if config is None:
        return None
    method = str(config.get("quant_method"))
    if method not in METHODS:
        raise ModelError(
            f"quantization_config.quant_method {method!r} is not supported; {', '.join(METHODS)} are"
        )
    _check(method, config)
    return _compressed_config(config) if method == "modelopt" else dict(config)


def _check(method: str, config: Mapping[str, Any]) -> None:
    def only(name: str, value: Any, known: tuple[Any, ...]) -> None:
        if value not in known:
            raise ModelError(
                f"quantization_config.{name}={value!r} is not supported; {', '.join(map(str, known))} are"
            )

    if method == "awq":
        only("bits", config.get("bits"), (4,))
        only("version", str(config.get("version", "gemm")).lower(), ("gemm",))
    elif method == "gptq":
        only("bits", config.get("bits"), (4, 8))
        only("checkpoint_format", config.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
    elif method == "compressed-tensors":
        only("format", config.get("format"), FORMATS)
        only("transform_config", config.get("transform_config") or None, (None,))
        only(
            "sparsity_config.format", (config.get("sparsity_config") or {}).get("format", "dense"), ("dense",)
        )
        float4 = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}.get(config["format"])
        for group in config_groups(config):
            weights = group["weights"]
            name = f"{weights.get('type')}{weights.get('num_bits')}"
            only("config_groups: weights", name, ("float4",) if float4 else ("int4", "int8", "float8"))
            if float4:
                only("config_groups: weights.group_size", weights.get("group_size"), (float4,))
            for setting, value in (group.get("input_activations") or {}).items():
                only(f"config_groups: input_activations.{setting}", value, INPUTS.get(setting, (value,)))
    elif method == "fp8":
        only("activation_scheme", config.get("activation_scheme"), SCHEMES)
    elif method == "modelopt":
        only("quant_algo", config.get("quant_algo"), ALGORITHMS)
        only("group_size", config.get("group_size"), (16, None))


def _compressed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Model Optimizer's configuration as one of compressed-tensors. It names modules that are not quantized
    by wildcards.
    """
    form, weights = "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}
    inputs: Group | None = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"}
    if config["quant_algo"] == "FP8":
        form, weights = "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}
        inputs = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    elif config["quant_algo"] == "W4A16_NVFP4":
        inputs = None
    ignore = [name + below for name in config.get("ignore") or [] for below in ("", ".*")]
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"weights": weights, "input_activations": inputs}},
        "ignore": [f"re:{TEXT_PARTS}{fnmatch.translate(_of_text(name))}" for name in ignore],
    }


def config_groups(config: Mapping[str, Any]) -> list[Group]:
    return [group for group in (config.get("config_groups") or {}).values() if group.get("weights")]


def quantized_inputs(config: Mapping[str, Any]) -> str:
    """How products are to quantize their inputs, such as "float8 static by tensor"; "": not at all."""
    if config["quant_method"] == "fp8":
        scheme = config.get("activation_scheme")
        by = "tensor" if scheme == "static" else "group" if config.get("weight_block_size") else "token"
        return "" if scheme is None else f"float8 {scheme} by {by}"
    every = (group["input_activations"] for group in config_groups(config) if group.get("input_activations"))
    inputs: Group = next(every, {})
    if not inputs:
        return ""
    scaling = "dynamic" if inputs.get("dynamic") is True else inputs.get("dynamic") or "static"
    sides = "" if inputs.get("symmetric", True) else "asymmetric "
    return f"{sides}{inputs.get('type')}{inputs.get('num_bits')} {scaling} by {inputs.get('strategy')}"


def stored_weights(config: Mapping[str, Any]) -> StoredWeights | None:
    """The format of weights that stay quantized in memory: four bits with groups, or eight bits with a scale
    per output, a single one, or one for each block whose width is a multiple of 128 inputs.

    None: weights are converted to dtype, as are GPTQ's with eight bits, and groups of non-consecutive inputs.
    """
    method = config["quant_method"]
    if method == "compressed-tensors":
        groups = config_groups(config)
        if len(groups) != 1:
            return None
        weights = groups[0]["weights"]
        others = tuple(_ignored(name) for name in config.get("ignore") or [])
        form, strategy = f"{weights['type']}{weights['num_bits']}", weights.get("strategy")
        symmetric = bool(weights.get("symmetric", True))
        if form == "float4":
            return StoredWeights(form="e2m1", group=int(weights["group_size"]), others=others)
        if form == "int4" and strategy == "group" and weights.get("actorder") not in SHUFFLED:
            return _four_bits(int(weights["group_size"]), not symmetric, others)
        if form in ("int8", "float8") and strategy in ("channel", "tensor") and symmetric:
            return _eight_bits(form, config, others)
        if form == "float8" and strategy == "block" and symmetric:
            return _blocks(weights["block_structure"], config, others)
        return None
    if method == "mxfp4":
        return StoredWeights(form="e2m1", group=32, others=(r"(?!.*\.experts$)",))
    # modules whose names contain one of these
    others = tuple(f".*{re.escape(_of_text(name))}" for name in config.get("modules_to_not_convert") or [])
    if method == "awq":
        return _four_bits(int(config["group_size"]), bool(config.get("zero_point", True)), others)
    if method == "gptq":
        others += tuple(rule[2:] for rule in config.get("dynamic") or {} if rule.startswith("-:"))
        changed = any(not rule.startswith("-:") for rule in config.get("dynamic") or {})
        if config["bits"] != 4 or config.get("desc_act") or changed:
            return None
        return _four_bits(int(config["group_size"]), not config.get("sym", True), others)
    if block := config.get("weight_block_size"):
        return _blocks(block, config, others)
    return _eight_bits("float8", config, others)


def _eight_bits(kind: str, config: Mapping[str, Any], others: tuple[str, ...]) -> StoredWeights:
    """Numbers with a scale for each output, or a single one."""
    inputs = quantized_inputs(config) in {f"{kind} {scaling}" for scaling in BY_ROW}
    return StoredWeights(form="int8" if kind == "int8" else FP8, inputs=inputs, others=others)


def _blocks(block: Sequence[int], config: Mapping[str, Any], others: tuple[str, ...]) -> StoredWeights | None:
    """Blocks (outputs, inputs) of FP8, as groups of inputs of each output."""
    sizes = {(group.get("input_activations") or {}).get("group_size") for group in config_groups(config)}
    inputs = quantized_inputs(config) == "float8 dynamic by group" and sizes <= {GROUP}
    return None if block[1] % GROUP else StoredWeights(form=FP8, group=GROUP, inputs=inputs, others=others)


def _four_bits(group: int, offset: bool, others: tuple[str, ...]) -> StoredWeights | None:
    if group % GROUPS[0]:  # also -1, which is one scale per output
        return None
    stored = max(n for n in GROUPS if group % n == 0)  # the scale of a larger group is repeated
    return StoredWeights(form="int4", group=stored, offset=offset, others=others)


def _ignored(name: str) -> str:
    """A pattern of a module's name: a regular expression, or its name in the whole model or the text part."""
    pattern = f"{TEXT_PARTS}{re.escape(_of_text(name))}$"
    return name.removeprefix("re:") if name.startswith("re:") else pattern


def _of_text(name: str) -> str:
    """A module's name without its parts' names, which are others in a model with images."""
    return re.sub(TEXT_PARTS, "", name, count=1) or name


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
        elif part not in (*ACTIVATIONS, *CACHES, "weight_shape"):
            out[name] = tensor
    if any(name.endswith(CACHES) for name in tensors):
        log.warning(
            "the checkpoint's scales of caches are not used; kv_cache_dtype says how caches are stored"
        )
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

    def fields(words: np.ndarray) -> np.ndarray:  # [rows, columns]
        apart = _fields(words, 4)
        return np.asarray(apart[..., np.argsort(AWQ_ORDER)].reshape(words.shape[0], -1))

    shape, middle = (words.shape[1] * 8, words.shape[0]), 8
    points = None if zeros is None else lambda: fields(zeros).T
    return _whole_numbers(shape, lambda: fields(words).T, scales.T, points, middle)


def _gptq(parts: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> StoredTensor:
    bits = int(config["bits"])
    words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    shape = words.shape[1], words.shape[0] * 32 // bits
    shift = int(config.get("checkpoint_format", "gptq") == "gptq")  # this format stores zero points minus one

    def numbers() -> np.ndarray:
        return np.asarray(_fields(words, bits).transpose(1, 0, 2).reshape(shape))

    def points() -> np.ndarray:
        return np.asarray((_fields(zeros, bits).reshape(zeros.shape[0], -1) + shift) & (2**bits - 1)).T

    return _whole_numbers(shape, numbers, scales.T, points, 2 ** (bits - 1), parts.get("g_idx"))


def _compressed(parts: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> StoredTensor:
    if config["format"] in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
        return _float4(parts)
    if "weight_packed" not in parts:
        return _scaled(parts, config)
    bits = next(group["weights"]["num_bits"] for group in config_groups(config))
    words, scale, zeros = parts["weight_packed"], parts["weight_scale"], parts.get("weight_zero_point")
    shape = words.shape[0], words.shape[1] * 32 // bits

    def points(words: np.ndarray) -> np.ndarray:  # words hold the zero points of consecutive outputs
        return _fields(words, bits).transpose(0, 2, 1).reshape(-1, words.shape[1])[: shape[0]]

    def numbers() -> np.ndarray:
        return _fields(words, bits).reshape(shape)

    zero_points = None if zeros is None else lambda: points(zeros)
    middle, index = 2 ** (bits - 1), parts.get("weight_g_idx")
    return _whole_numbers(shape, numbers, scale, zero_points, middle, index)


def _whole_numbers(
    shape: tuple[int, int],
    numbers: Callable[[], np.ndarray],
    scales: np.ndarray,
    zeros: Callable[[], np.ndarray] | None,
    middle: int,
    index: np.ndarray | None = None,
) -> StoredTensor:
    """A tensor of unsigned numbers [out, in] with scales and zero points [out, groups].

    Args:
        zeros: None: all are `middle`, which becomes 0.
        index: the group of each input; None: they are consecutive.
    """
    group = -(-shape[1] // scales.shape[1])

    def read() -> GroupedValues:
        scale, each, offset = scales.astype(np.float32), group, None
        if zeros is not None:
            offset = (middle - zeros()) * scale
        if index is not None and not np.array_equal(index, np.arange(shape[1]) // group):
            scale, offset, each = scale[:, index], None if offset is None else offset[:, index], 1
        values = np.ascontiguousarray((numbers() - middle).astype(np.int8))
        return GroupedValues(values, scale, offset if offset is None or offset.any() else None, (1, each))

    return StoredTensor(shape, read)


def _float4(parts: Mapping[str, np.ndarray]) -> StoredTensor:
    """NVFP4, which has a float8 scale for each 16 inputs and a float32 one for all; or MXFP4, which has an
    exponent for each 32 inputs.
    """
    packed = parts["weight" if "weight_packed" not in parts else "weight_packed"]
    scale, shape = parts["weight_scale"], (packed.shape[0], 2 * packed.shape[1])
    # of all weights: Model Optimizer's multiplies the scales, compressed-tensors' divides them
    multiplies = "weight_scale_2" in parts
    name = "weight_scale_2" if multiplies else "weight_global_scale"
    shared = None if scale.dtype == np.uint8 else parts[name].reshape(())

    def read() -> GroupedValues:
        if shared is None:
            halved = _half_powers(scale, "weight_scale")
        else:
            wide = scale.astype(np.float32)
            halved = (wide * shared if multiplies else wide / shared) / 2
        return GroupedValues(_doubled(packed), halved, None, (1, shape[1] // scale.shape[1]))

    return StoredTensor(shape, read)


def _doubled(packed: np.ndarray) -> np.ndarray:
    """Twice the e2m1 numbers of bytes [out, in / 2], which have the first of two in their lower half: int8
    [out, in].
    """
    table = np.array([*E2M1, *(-n for n in E2M1)], np.int8)
    return table[np.stack([packed & 15, packed >> 4], axis=-1)].reshape(len(packed), -1)


def _half_powers(exponents: np.ndarray, name: str) -> np.ndarray:
    """Half of MXFP4's scales, since numbers are doubled: float32.

    Raises:
        ModelError: a scale is above 2^65, or NaN: kernels multiply weights by scales in bfloat16.
    """
    if (largest := int(exponents.max())) > LARGEST_SCALE:
        text = "NaN" if largest == 255 else f"2^{largest - 127}"
        raise ModelError(f"has a scale of {text}; at most 2^{LARGEST_SCALE - 127}", tensor=name)
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128).astype(np.float32)


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
            scales = _array(tensors[f"{weight}_scales"])
            out[weight] = Tensor(tensor.file, _Experts(_array(tensor), scales, f"{weight}_scales"))
    return out


class _Experts(StoredTensor):
    """Weights [experts, in, out] in MXFP4, with groups as for [experts * out, in]."""

    def __init__(self, blocks: np.ndarray, scales: np.ndarray, name: str) -> None:
        experts, outs = blocks.shape[:2]
        inputs = math.prod(blocks.shape[2:]) * 2

        def read() -> GroupedValues:
            values = _doubled(blocks.reshape(experts * outs, -1))
            halved = _half_powers(scales.reshape(experts * outs, -1), name)
            return GroupedValues(values, halved, None, (1, inputs // scales.shape[-1]))

        super().__init__((experts, inputs, outs), read)

    def dense(self) -> np.ndarray:
        experts, inputs, outs = self.shape
        return super().dense().reshape(experts, outs, inputs).swapaxes(1, 2)


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned fields of words, the lowest first: int32 [..., 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)).astype(np.int32)
