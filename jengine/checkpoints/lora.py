"""Reads LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Nothing is ignored: a tensor, a module or a setting that would not take effect is an error that names it,
since the answers would silently be those of another model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jengine.base.errors import ModelError
from jengine.base.model_files import read_object
from jengine.checkpoints.lora_config import MAX_NAME, lora_config
from jengine.checkpoints.safetensors import parse, read_file
from jengine.checkpoints.stored import Tensor, dense
from jengine.core.lora import LoraSource
from jengine.hub.files import hub_name
from jengine.hub.repository import download
from jengine.models import Model
from jengine.models.adapters import Factors, LoraWeights, Module, Site, bare, module_names

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)"
    r"\.lora_(?:(?P<side>[AB])(?:\.[^.]+)?\.weight|embedding_(?P<table>[AB])(?:\.[^.]+)?)"
)


BASE = re.compile(r"(\.base_layer)+$")
MOVED = (".mlp.", ".block_sparse_moe.")  # transformers' name, and that of Mixtral's checkpoints


class Change(NamedTuple):
    """What an adapter changes with one pair of matrices.

    Attributes:
        name: of the module or parameter, as PEFT's patterns know it.
        modules: factors by name; of all experts, if the parameter has them.
    """

    name: str
    rank: int
    modules: Mapping[str, Factors]


def read_lora(
    source: LoraSource,
    modules: Mapping[str, Module],
    model: Model,
    max_rank: int,
    fused: Mapping[str, Site] | None = None,
    dtype: jax.typing.DTypeLike = "float32",
) -> LoraWeights:
    """Reads an adapter for a model.

    Args:
        modules: those of the model that adapters may change, by their bare names.
        max_rank: the largest supported one.
        fused: parameters with all experts of a layer, by transformers' names.
        dtype: of the adapter on the devices.

    Raises:
        ModelError: it cannot be read, or does not fit the model; names the file and the module.
    """
    place, config, tensors = _read(source)
    settings, file = lora_config(config, place / CONFIG), place / TENSORS
    pairs = _pairs(tensors, file)
    if not pairs:
        raise ModelError("has no tensors of an adapter", file=file)

    def changed(name: str, a: np.ndarray, b: np.ndarray) -> Change:
        bare_name = bare(name, model.prefix)
        if (module := modules.get(bare_name)) is not None:
            _check_shapes(name, a, b, module, max_rank, file)
            return Change(name, len(a), {module.name: (a, b)})
        if (site := fused_site(bare_name, a, b, fused or {})) is not None and site.fused is not None:
            each = of_experts(site, a, b)
            rank = len(next(iter(each.values()))[0])
            _check_rank(name, rank, max_rank, file)
            return Change(f"{BASE.sub('', name)}.{site.fused.rpartition('.')[2]}", rank, each)
        raise ModelError(
            f"the model has no module {name} that an adapter may change; those of experts, embeddings and"
            " output heads must be in lora_target_modules",
            file=file,
        )

    changes = [changed(name, *pair) for name, pair in pairs.items()]
    scales = settings.scales({change.name: change.rank for change in changes})
    factors: dict[str, Factors] = {}
    for change in changes:
        for name, (a, b) in change.modules.items():
            if name in factors:
                raise ModelError(f"module {name} is given twice, under two names", file=file)
            factors[name] = (
                _finite(a, np.float32(1), dtype, f"lora_A of module {name}", file),
                _finite(b, scales[change.name], dtype, f"lora_B of module {name}", file),
            )
    # what names have before bare ones
    before = {name.removesuffix(bare(name, model.prefix)) for name in pairs}
    others = [start + name for start in before for name in module_names(model) - factors.keys()]
    settings.check_targets(pairs, others, [change.name for change in changes if change.name not in pairs])
    return LoraWeights(max(change.rank for change in changes), factors)


def _read(source: LoraSource) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    if source.config is not None:
        place = Path(f"lora {source.name}")
        return place, source.config, parse(np.frombuffer(source.tensors, np.uint8), place / TENSORS, ())
    folder = Path(source.path).expanduser()
    if not folder.is_dir():
        folder = download(str(hub_name(source.path)), None, [CONFIG, TENSORS])
    if not (folder / TENSORS).exists() and (folder / "adapter_model.bin").exists():
        raise ModelError(
            f"only {TENSORS} is read; save the adapter with safe_serialization=True", file=folder
        )
    return folder, read_object(folder / CONFIG), read_file(folder / TENSORS, ())


def _pairs(tensors: Mapping[str, Tensor], file: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Both factors of each module, by its name in the file, without PEFT's prefix."""
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name) if len(name) <= MAX_NAME else None
        if match is None:
            raise ModelError(f"is not supported{_why(name)}", file=file, tensor=name)
        sides = pairs.setdefault(match["module"], {})
        # a table is the transpose of a layer's matrix, so its factors have changed places
        side = match["side"] or {"A": "B", "B": "A"}[match["table"]]
        if side in sides:
            raise ModelError("is given twice, under two names of an adapter", file=file, tensor=name)
        array = dense(tensor.array)
        if array.ndim != 2 or not array.size or array.dtype.kind not in "fV":
            raise ModelError(
                f"must be a matrix of floats, not {array.dtype}{list(array.shape)}", file=file, tensor=name
            )
        sides[side] = array if match["side"] else array.T
    for module, sides in pairs.items():
        if missing := {"A", "B"} - sides.keys():
            raise ModelError(f"module {module} has no lora_{missing.pop()}", file=file)
    return {module: (sides["A"], sides["B"]) for module, sides in sorted(pairs.items())}


def _finite(
    array: np.ndarray, scale: np.float32, dtype: jax.typing.DTypeLike, what: str, file: Path
) -> np.ndarray:
    """The numbers as devices store them. Other requests' rows multiply some of these by zero, and zero times
    infinity is not zero.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (array.astype(np.float32) * scale).astype(dtype)
    if not np.isfinite(scaled).all():
        why = "" if scale == 1 else f" after it is multiplied by the scale {scale:g}"
        raise ModelError(f"{what} has a number that is not finite in {scaled.dtype}{why}", file=file)
    return scaled


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


def fused_site(name: str, a: np.ndarray, b: np.ndarray, fused: Mapping[str, Site]) -> Site | None:
    """The parameter that the factors of a module change; None: there is none with these shapes."""
    layer = BASE.sub("", name)
    for candidate in (layer, layer.replace(*MOVED)):
        for parameter in ("gate_up_proj", "down_proj"):
            site = fused.get(f"{candidate}.{parameter}")
            if site is not None and _fits(site, a, b):
                return site
    return None


def _fits(site: Site, a: np.ndarray, b: np.ndarray) -> bool:
    """Whether both factors have the same rank for each expert, and the outputs and inputs of its matrix in
    transformers, which has all parts, one after the other.
    """
    outs, inputs = site.modules[0].shape
    same_rank = len(a) == b.shape[1] and site.experts is not None and len(a) % site.experts == 0
    return same_rank and (len(b), a.shape[1]) == (site.parts * outs, inputs)


def of_experts(site: Site, a: np.ndarray, b: np.ndarray) -> dict[str, Factors]:
    """The factors of each expert's modules, by their names."""
    assert site.experts is not None
    downs = a.reshape(site.experts, -1, a.shape[1])
    ups = b.reshape(site.parts, -1, downs.shape[1], site.experts)
    modules = {}
    for number, module in enumerate(site.modules):
        expert, part = divmod(number, site.parts)
        modules[module.name] = downs[expert], ups[part, :, :, expert]
    return modules
