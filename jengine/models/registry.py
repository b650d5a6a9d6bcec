"""Model families by model_type: those of this package, and others that users add."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import pkgutil
from pathlib import Path
from typing import Any

from flax import nnx

from jengine.base.errors import InvalidArgument, ModelError
from jengine.models.config import ModelConfig
from jengine.models.family import Decoder, Family, Fields

GROUP = "jengine.families"  # of entry points: a model_type and its Family
# Decoder's attributes, and what a model lacks without them
PARTS = {
    "prefix": "the prefix of its tensors' names",
    "head": "names of the attributes that only `logits` uses",
    "layers": "an nnx.List of layers, each with an `attention`",
    "embed": "the table of tokens' vectors, from layers.vocabulary",
    "lm_head": "the output head, from layers.vocabulary, or None if embed is used",
    "hidden": "(tokens, positions, attend) -> hidden states",
    "logits": "hidden states -> logits",
}
MODULES = [
    importlib.import_module(f"{__package__}.{file.name}")
    for file in pkgutil.iter_modules([str(Path(__file__).parent)])
]


def _declared(name: str) -> dict[str, Family]:
    return dict(sorted(item for module in MODULES for item in getattr(module, name, {}).items()))


FAMILIES = _declared("FAMILIES")
# heads that draft, by the name of their model's family and "_mtp", and by names of their own
DRAFT_HEADS = _declared("DRAFT_HEADS")


def register(model_type: str, family: Family) -> None:
    """Adds a model family to this process.

    Other processes, such as those of `jengine serve`, find families of installed packages, which name them in
    the entry points of the group "jengine.families".

    Args:
        model_type: in a model's config.json.

    Raises:
        InvalidArgument: it is no Family, or the model_type has another family.
    """
    if not isinstance(family, Family):
        raise InvalidArgument("family", family, "must be a jengine.models.Family")
    if FAMILIES.setdefault(model_type, family) != family:
        raise InvalidArgument("model_type", model_type, f"is that of {FAMILIES[model_type].title}")


def family_of(model_type: str) -> Family | None:
    """The family of this model_type; None: there is none.

    Raises:
        ModelError: an installed package names such a family, and importing it fails.
    """
    if model_type not in FAMILIES:
        _register_installed(model_type)
    return FAMILIES.get(model_type)


def supported(model_type: str) -> Family:
    """The family of this model_type. Raises ModelError if there is none."""
    family = family_of(model_type)
    if family is None:
        limit = f"is not supported; {', '.join(sorted(FAMILIES))} are"
        raise ModelError(f"model_type {model_type!r} {limit}")
    return family


def _register_installed(model_type: str) -> None:
    for entry in importlib.metadata.entry_points(group=GROUP, name=model_type):
        try:
            register(model_type, entry.load())
        except Exception as error:  # the package's code
            raise ModelError(
                f"the entry point {GROUP}: {model_type} = {entry.value} fails: {error}"
            ) from error


def read(model_type: str, family: Family, fields: Fields) -> dict[str, Any]:
    """A family's fields of ModelConfig, from those of config.json.

    Raises:
        ModelError: as Family.read, or its reader forgets a field, or gives an unknown one.
    """
    config = family.read(fields)
    known = {field.name: field for field in dataclasses.fields(ModelConfig)}
    for name, field in known.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in config and name != "family":
            raise ModelError(f"{model_type}: its reader gives no {name}, which ModelConfig needs")
    for name in config:
        if name not in known:
            raise ModelError(f"{model_type}: its reader gives {name}, which ModelConfig does not have")
    for part in config.get("parts", ()):
        if type(part) not in family.parts:
            raise ModelError(f"{model_type}: its reader gives {type(part).__name__}, not one of Family.parts")
    return config


def check(title: str, module: Decoder) -> None:
    """Raises ModelError if a family's module lacks a part that every model needs."""
    for name, what in PARTS.items():
        if not hasattr(module, name):
            raise ModelError(f"{title}: {type(module).__name__} has no `{name}`: {what}")
    for index, layer in enumerate(module.layers):
        if not callable(getattr(getattr(layer, "attention", None), "cache", None)):
            raise ModelError(f"{title}: layers[{index}] has no `attention` that declares its `cache`")
    for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if "axes" not in parameter.get_metadata():
            name = ".".join(map(str, path))
            raise ModelError(
                f"{title}: the parameter {name} must be declared by layers.param, matrix or vocabulary, which"
                " name its axes and the checkpoint's tensors"
            )
