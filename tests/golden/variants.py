"""The tiny models: Hugging Face's config.json and the tensors of each, collected from the files of
families/.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from tests.golden import families
from tests.golden.declaring import Shapes

FAMILIES = [
    importlib.import_module(f"{families.__name__}.{file.name}")
    for file in pkgutil.iter_modules(families.__path__)
]
VARIANTS: dict[str, dict[str, Any]] = {
    name: config for family in FAMILIES for name, config in family.VARIANTS.items()
}
# recorded for more prompts
ALL_LENGTHS = frozenset(name for family in FAMILIES for name in getattr(family, "ALL_LENGTHS", ()))
_SHAPES = {
    part["model_type"]: family.shapes
    for family in FAMILIES
    for config in family.VARIANTS.values()
    for part in (config, config.get("text_config", config))
}


def tensor_shapes(config: dict[str, Any]) -> Shapes:
    """Every tensor of a checkpoint with this configuration, written independently of jengine's
    declarations.
    """
    found: Shapes = _SHAPES[config["model_type"]](config)
    return found
