"""Reads quantization_config of a config.json: how weights are stored, and in which form they are kept in
memory.

Supports AWQ, GPTQ, compressed-tensors, FP8 and gpt-oss's MXFP4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.base.errors import ModelError
from jengine.models.config_parts import StoredWeights
from pallas_kernels.quantization.int4 import GROUPS
from pallas_kernels.quantization.quantized import GROUP

METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
# of compressed-tensors
FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
Group = dict[str, Any]


def quantization_config(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization_config among a config.json's fields.

    Raises:
        ModelError: it is not supported.
    """
    found = fields.get("quantization_config") or fields.get("compression_config")
    if found is None:
        return None
    method = str(found.get("quant_method"))
    if method not in METHODS:
        raise ModelError(
            f"quantization_config.quant_method {method!r} is not supported; {', '.join(METHODS)} are"
        )
    _check(method, found)
    return dict(found)


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
        only("kv_cache_scheme", config.get("kv_cache_scheme"), (None,))
        only("transform_config", config.get("transform_config") or None, (None,))
        only(
            "sparsity_config.format", (config.get("sparsity_config") or {}).get("format", "dense"), ("dense",)
        )
        for group in config_groups(config):
            weights = group["weights"]
            name = f"{weights.get('type')}{weights.get('num_bits')}"
            only("config_groups: weights", name, ("int4", "int8", "float8"))


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
    how = "dynamic" if inputs.get("dynamic") is True else inputs.get("dynamic") or "static"
    sides = "" if inputs.get("symmetric", True) else "asymmetric "
    return f"{sides}{inputs.get('type')}{inputs.get('num_bits')} {how} by {inputs.get('strategy')}"


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
        symmetric = bool(weights.get("symmetric", True))
        if weights["num_bits"] == 4 and weights.get("strategy") == "group" and not weights.get("actorder"):
            return _four_bits(int(weights["group_size"]), not symmetric, others)
        if weights["num_bits"] == 8 and weights.get("strategy") in ("channel", "tensor") and symmetric:
            return _eight_bits(f"{weights['type']}8", config, others)
        if (
            weights["num_bits"] == 8
            and weights.get("strategy") == "block"
            and symmetric
            and weights["type"] == "float"
        ):
            return _blocks(weights["block_structure"], others)
        return None
    if method == "mxfp4":
        return StoredWeights(form="e2m1", group=32, others=(r"(?!.*\.experts$)",))
    # modules whose names contain one of these
    others = tuple(f".*{re.escape(name)}" for name in config.get("modules_to_not_convert") or [])
    if method == "awq":
        return _four_bits(int(config["group_size"]), bool(config.get("zero_point", True)), others)
    if method == "gptq":
        others += tuple(rule[2:] for rule in config.get("dynamic") or {} if rule.startswith("-:"))
        changed = any(not rule.startswith("-:") for rule in config.get("dynamic") or {})
        if config["bits"] != 4 or config.get("desc_act") or changed:
            return None
        return _four_bits(int(config["group_size"]), not config.get("sym", True), others)
    if block := config.get("weight_block_size"):
        return _blocks(block, others)
    return _eight_bits("float8", config, others)


def _eight_bits(kind: str, config: Mapping[str, Any], others: tuple[str, ...]) -> StoredWeights:
    """Numbers with a scale for each output, or a single one."""
    form: Any = "int8" if kind == "int8" else "float8_e4m3fn"
    return StoredWeights(
        form=form, inputs=quantized_inputs(config) == f"{kind} dynamic by token", others=others
    )


def _blocks(block: Sequence[int], others: tuple[str, ...]) -> StoredWeights | None:
    """Blocks (outputs, inputs) of FP8, as groups of inputs of each output."""
    return None if block[1] % GROUP else StoredWeights(form="float8_e4m3fn", group=GROUP, others=others)


def _four_bits(group: int, offset: bool, others: tuple[str, ...]) -> StoredWeights | None:
    if group % GROUPS[0]:  # also -1, which is one scale per output
        return None
    own = max(n for n in GROUPS if group % n == 0)  # the scale of a larger group is repeated
    return StoredWeights(form="int4", group=own, offset=offset, others=others)


def _ignored(name: str) -> str:
    """A module's name, or a regular expression of it."""
    return name.removeprefix("re:") if name.startswith("re:") else re.escape(name) + "$"
