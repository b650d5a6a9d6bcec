"""The option lora_modules: LoRA adapters by name, as vLLM's flag of this name takes them."""

from __future__ import annotations

import contextlib
import json
from typing import Any, NamedTuple

from jengine import InvalidArgument, LoRARequest

FORMS = 'must be NAME=PATH, or {"name": NAME, "path": PATH, "base_model_name": NAME}'


class LoraModule(NamedTuple):
    """An adapter to load.

    Attributes:
        name: as clients name it.
        path: a folder or a hub id.
        base_model_name: the name that /v1/models shows as its parent; None: the served model's.
    """

    name: str
    path: str
    base_model_name: str | None = None


def read_modules(value: object) -> tuple[LoraModule, ...]:
    """The adapters of the option: a list of them, or text with several, separated by spaces or as JSON.

    Raises:
        InvalidArgument: an item has another form, or a name is given twice.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    items = value.split() if isinstance(value, str) else [value] if isinstance(value, dict) else value
    if not isinstance(items, list | tuple):
        raise InvalidArgument("lora_modules", value, f"each {FORMS}")
    modules = tuple(_module(item) for item in items)
    for i, module in enumerate(modules):
        if module.name in {other.name for other in modules[:i]}:
            raise InvalidArgument("lora_modules", module.name, "is given twice")
    return modules


def _module(item: object) -> LoraModule:
    if isinstance(item, LoraModule):
        return item
    fields: Any = item
    if isinstance(item, str):
        name, equals, path = item.partition("=")
        fields = {"name": name, "path": path} if equals else None
        if item.lstrip().startswith("{"):
            with contextlib.suppress(ValueError):
                fields = json.loads(item)
    if (
        not isinstance(fields, dict)
        or not {"name", "path"} <= fields.keys() <= set(LoraModule._fields)
        or not all(isinstance(value, str) and value for name, value in fields.items() if value is not None)
        or fields["path"] is None
    ):
        raise InvalidArgument("lora_modules", item, FORMS)
    module = LoraModule(**fields)
    LoRARequest(module.name)  # checks the name
    return module
