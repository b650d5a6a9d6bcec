"""Names of a module that are imported on first use."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from jengine.base.process import uncollected

ENTRY = re.compile(r"^from ([\w.]+) import (\w+) as \2$", re.MULTILINE)
ALIAS = re.compile(r"^(\w+) = (\w+)$", re.MULTILINE)
Exports = tuple[list[str], Callable[[str], object], Callable[[], list[str]]]


def lazy_names(module: str, file: str, missing: Callable[[str], Exception]) -> Exports:
    """Reads the names that a module exports from the stub beside it, which type checkers read too. Its lines
    are `from MODULE import NAME as NAME`, and `ALIAS = NAME`.

    Args:
        module, file: the module's `__name__` and `__file__`.
        missing: the error for a name that it does not have.

    Returns:
        The module's `__all__` (without aliases), `__getattr__` and `__dir__`.
    """
    stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    homes = {name: home for home, name in ENTRY.findall(stub)}
    aliases = dict(ALIAS.findall(stub))
    public = sorted(homes)

    def load(wanted: str) -> object:
        name = aliases.get(wanted, wanted)
        if name not in homes:
            raise missing(wanted)
        with uncollected():  # which would take a tenth of the time of importing jax
            value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[module], wanted, value)  # later uses do not come here
        return value

    return public, load, public.copy
