"""Programs from a folder that was asked for by name: all of them, for exactly what is wanted, or none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from jengine.config import EngineConfig
from jengine.errors import InvalidArgument
from jengine.execution.program_store import Doubt, Manifest, ProgramStore


class GivenPrograms(ProgramStore):
    """A folder that `jengine compile` wrote. Where the cache would count a program as absent, this refuses.

    Raises:
        InvalidArgument: the folder cannot be read or trusted.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            self._manifest = super().manifest()
        except Doubt as doubt:
            raise self._refusal(str(doubt)) from None

    def manifest(self) -> Manifest:
        return self._manifest

    def complete(self, config: EngineConfig) -> EngineConfig:
        """The options, with what they leave to the machine as the programs have it: dtype, and the number of pages."""
        facts = self._manifest.facts
        dtype: Any = facts.get("dtype") if config.dtype == "auto" else config.dtype
        left = config.num_pages is None and config.kv_cache_memory is None
        return dataclasses.replace(config, dtype=dtype, num_pages=facts.get("num_pages") if left else config.num_pages)

    def check(self, facts: dict[str, object]) -> None:
        """Whether the programs are for something of these facts.

        Raises:
            InvalidArgument: they are not; names a fact that differs.
        """
        different = difference(self._manifest.facts, json.loads(json.dumps(facts, default=list)))
        if different is not None:
            raise self._refusal(f"its programs are for something else: {different}")

    def load(self, names: Iterable[str], facts: dict[str, object], devices: Sequence[jax.Device]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(every named executable, notes).

        Raises:
            InvalidArgument: the programs are for other facts; or one is missing, not to be trusted, or cannot be loaded.
        """
        self.check(facts)
        try:
            return {name: self.load_one(name, self._manifest.programs, devices) for name in names}, self._manifest.notes
        except Doubt as doubt:
            raise self._refusal(str(doubt)) from doubt

    def _refusal(self, why: str) -> InvalidArgument:
        return InvalidArgument("programs", str(self.folder), why)


def difference(saved: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> str | None:
    """The first fact that differs, in their order, as "name is X there, Y is wanted"; None where all are equal. Both as JSON has them."""
    for name in {**wanted, **saved}:
        there, here = saved.get(name), wanted.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            inside = difference(there, here, f"{prefix}{name}.")
            if inside is not None:
                return inside
        elif there != here:
            return f"{prefix}{name} is {_shown(there)} there, {_shown(here)} is wanted"
    return None


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
