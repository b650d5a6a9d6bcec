"""Reads LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Nothing is ignored: a tensor, a module or a setting that would not take effect is an error that names it,
since the answers would silently be those of another model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jengine.base.errors import ModelError
from jengine.base.model_files import read_object
from jengine.checkpoints.folder import resolve
from jengine.checkpoints.lora_experts import BASE, fused_site, of_experts
from jengine.checkpoints.safetensors import parse, read_file
from jengine.checkpoints.stored import Tensor, dense
from jengine.core.lora import LoraSource
from jengine.models.adapters import Factors, LoraWeights, Module, Site, bare

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)"
    r"\.lora_(?:(?P<side>[AB])(?:\.[^.]+)?\.weight|embedding_(?P<table>[AB])(?:\.[^.]+)?)"
)
# Settings that change results in ways that are not supported, and the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[str, Sequence[Any]]] = {
    "use_dora": ("DoRA is not supported: merge the adapter into the weights", (False,)),
    "modules_to_save": ("whole modules are not replaced: merge the adapter into the weights", ([],)),
    "bias": ("biases are not changed: merge the adapter into the weights", ("none",)),
    "lora_bias": ("biases of adapters are not supported", (False,)),
    "layer_replication": ("layers are not repeated", ([],)),
    "trainable_token_indices": ("rows of embeddings are not replaced", ([],)),
    "alora_invocation_tokens": ("activated LoRA is not supported", ([],)),
    "use_qalora": ("QALoRA is not supported", (False,)),
    "use_bdlora": ("block-diagonal LoRA is not supported", (False,)),
    "arrow_config": ("routing among adapters is not supported", ()),
}
CHANGES_BASE = re.compile(r"(?i)pissa|olora|corda|loftq")  # values of init_lora_weights


def read_lora(
    source: LoraSource,
    modules: Mapping[str, Module],
    prefix: str,
    max_rank: int,
    fused: Mapping[str, Site] | None = None,
) -> LoraWeights:
    """Reads an adapter for a model.

    Args:
        modules: those of the model that adapters may change, by their bare names.
        prefix: of the model's tensors, see Decoder.
        max_rank: the largest supported one.
        fused: parameters with all experts of a layer, by transformers' names.

    Raises:
        ModelError: it cannot be read, or does not fit the model; names the file and the module.
    """
    place, config, tensors = _read(source)
    file = place / CONFIG
    _check_config(config, file)
    pairs = _pairs(tensors, place / TENSORS)
    factors: dict[str, Factors] = {}
    parameters = []  # names of those with all experts
    for name, (a, b) in pairs.items():
        module = modules.get(bare(name, prefix))
        if module is not None:
            _check_shapes(name, a, b, module, max_rank, place / TENSORS)
            factors[module.name] = a, b * _scale(config, name, len(a), file)
        elif (site := fused_site(bare(name, prefix), a, b, fused or {})) is not None:
            each = of_experts(site, a, b)
            rank = len(next(iter(each.values()))[0])
            _check_rank(name, rank, max_rank, place / TENSORS)
            parameters.append(f"{BASE.sub('', name)}.{site.fused.rpartition('.')[2]}")  # type: ignore[union-attr]
            scale = _scale(config, parameters[-1], rank, file)
            factors |= {one: (a, b * scale) for one, (a, b) in each.items()}
        else:
            raise ModelError(
                f"the model has no module {name} that an adapter may change; those of experts, embeddings and"
                " output heads must be in lora_target_modules",
                file=place / TENSORS,
            )
    if not factors:
        raise ModelError("has no tensors of an adapter", file=place / TENSORS)
    _check_targets(config, pairs, file)
    for target in config.get("target_parameters") or []:
        if not any(f".{name}".endswith(f".{target}") for name in parameters):
            raise ModelError(f"target_parameters has {target!r}, but no such one has tensors", file=file)
    return LoraWeights(max(len(a) for a, _ in factors.values()), factors)


def _read(source: LoraSource) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    if source.config is not None:
        place = Path(f"lora {source.name}")
        return place, source.config, parse(np.frombuffer(source.tensors, np.uint8), place / TENSORS, ())
    folder = resolve(source.path, files=[CONFIG, TENSORS])
    if not (folder / TENSORS).exists() and (folder / "adapter_model.bin").exists():
        raise ModelError(
            f"only {TENSORS} is read; save the adapter with safe_serialization=True", file=folder
        )
    return folder, read_object(folder / CONFIG), read_file(folder / TENSORS, ())


def _check_config(config: Mapping[str, Any], file: Path) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"peft_type {kind!r} is not supported; LORA is", file=file)
    for name, (why, nothing) in UNSUPPORTED.items():
        value = config.get(name)
        if value is not None and value not in nothing:
            raise ModelError(f"{name}={value!r}: {why}", file=file)
    if isinstance(how := config.get("init_lora_weights"), str) and CHANGES_BASE.search(how):
        raise ModelError(
            f"init_lora_weights={how!r} changes the model's own weights; save the adapter as a plain one with"
            " path_initial_model_for_weight_conversion",
            file=file,
        )


def _pairs(tensors: Mapping[str, Tensor], file: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Both factors of each module, by its name in the file, without PEFT's prefix."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"is not supported{_why(name)}", file=file, tensor=name)
        sides = found.setdefault(match["module"], {})
        # a table is the transpose of a layer's matrix, so its factors have changed places
        side = match["side"] or {"A": "B", "B": "A"}[match["table"]]
        if side in sides:
            raise ModelError("is given twice, under two names of an adapter", file=file, tensor=name)
        array = dense(tensor.array)
        if array.ndim != 2 or array.dtype.kind not in "fV":
            raise ModelError(
                f"must be a matrix of floats, not {array.dtype}{list(array.shape)}", file=file, tensor=name
            )
        array = _finite(array.astype(np.float32), file, name)
        sides[side] = array if match["side"] else array.T
    for module, sides in found.items():
        if missing := {"A", "B"} - sides.keys():
            raise ModelError(f"module {module} has no lora_{missing.pop()}", file=file)
    return {module: (sides["A"], sides["B"]) for module, sides in sorted(found.items())}


def _finite(array: np.ndarray, file: Path, name: str) -> np.ndarray:
    """Other requests' rows multiply an adapter's numbers by zero, and zero times infinity is not zero."""
    if not np.isfinite(array).all():
        raise ModelError("has a number that is not finite", file=file, tensor=name)
    return array


def _why(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return ": DoRA is not supported; merge the adapter into the weights"
    if name.endswith(".base_layer.weight"):
        return ": whole weights are not replaced; save the adapter with save_embedding_layers=False"
    if name.endswith("bias"):
        return ": biases are not changed"
    return ": only lora_A.weight and lora_B.weight of modules are"


def _check_shapes(name: str, a: np.ndarray, b: np.ndarray, module: Module, max_rank: int, file: Path) -> None:
    outs, inputs = module.shape
    if len(a) != b.shape[1]:
        raise ModelError(f"module {name}: lora_A has rank {len(a)}, lora_B has {b.shape[1]}", file=file)
    _check_rank(name, len(a), max_rank, file)
    if (len(b), a.shape[1]) != (outs, inputs):
        raise ModelError(
            f"module {name} has {a.shape[1]} inputs and {len(b)} outputs; the model's {inputs} and {outs}",
            file=file,
        )


def _check_rank(name: str, rank: int, max_rank: int, file: Path) -> None:
    if rank > max_rank:
        raise ModelError(f"module {name} has rank {rank}, above max_lora_rank={max_rank}", file=file)


def _scale(config: Mapping[str, Any], name: str, rank: int, file: Path) -> np.float32:
    r = _of_pattern(config.get("rank_pattern"), name, config.get("r", 8))
    alpha = _of_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    if type(r) is not int or type(alpha) not in (int, float):
        raise ModelError(f"r={r!r} and lora_alpha={alpha!r} must be numbers", file=file)
    if r != rank:
        raise ModelError(f"module {name} has rank {rank}, but the configuration says r={r}", file=file)
    return np.float32(float(alpha) / (math.sqrt(r) if config.get("use_rslora") else r))


def _of_pattern(patterns: Any, name: str, default: Any) -> Any:
    """The value of the first pattern that matches a module's name, as PEFT applies them."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _check_targets(config: Mapping[str, Any], found: Mapping[str, Any], file: Path) -> None:
    """Checks that each target of the configuration has a module with tensors."""
    targets = config.get("target_modules")
    if isinstance(targets, list | tuple | set):
        for target in targets:
            if not any(name == target or name.endswith(f".{target}") for name in found):
                raise ModelError(f"target_modules has {target!r}, but no module of it has tensors", file=file)
    elif isinstance(targets, str) and not any(re.fullmatch(targets, name) for name in found):
        raise ModelError(f"target_modules={targets!r} matches no module with tensors", file=file)
