"""Programs from a folder given by the user: all of them must match exactly, or loading fails."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.execution.program_folder import Manifest, UntrustedProgram
from jengine.execution.program_store import ProgramStore


class PrebuiltPrograms(ProgramStore):
    """A folder written by `jengine compile`. Raises an error where the cache would treat a program as absent.

    Raises:
        InvalidArgument: the folder cannot be read or is not trusted.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            self._manifest = super().manifest()
        except UntrustedProgram as error:
            raise self._refusal(str(error)) from None

    def manifest(self) -> Manifest:
        return self._manifest

    def complete(self, config: EngineConfig) -> EngineConfig:
        """Fills in options that are normally derived from the machine (dtype, number of pages) with those of
        the programs."""
        saved = self._manifest.identity
        dtype: Any = saved.get("dtype") if config.dtype == "auto" else config.dtype
        left = config.num_pages is None and config.kv_cache_memory is None
        return dataclasses.replace(
            config, dtype=dtype, num_pages=saved.get("num_pages") if left else config.num_pages
        )

    @property
    def product_forms(self) -> dict[str, str]:
        """product_forms of the spec that the programs were compiled for."""
        forms: Any = self._manifest.identity.get("product_forms")
        return dict(forms) if isinstance(forms, dict) else {}

    def check(self, identity: dict[str, object]) -> None:
        """Checks that the programs are for this identity (see ExecutionSpec.identity).

        Raises:
            InvalidArgument: they are not; the message names the first difference.
        """
        different = difference(self._manifest.identity, json.loads(json.dumps(identity, default=list)))
        if different is not None:
            raise self._refusal(f"its programs are for something else: {different}")

    def load(
        self,
        names: Iterable[str],
        identity: dict[str, object],
        devices: Sequence[jax.Device],
        before: Callable[[], object],
    ) -> Iterator[tuple[str, Any]]:
        """Yields each named executable with its name. All must be present.

        Args:
            before: is called before any is loaded.

        Raises:
            InvalidArgument: the programs are for another identity, or one is missing, not trusted, or cannot
                be loaded.
        """
        self.check(identity)
        before()
        try:
            for name, done in self.load_each(names, self._manifest.programs, devices):
                yield name, done.result()
        except UntrustedProgram as error:
            raise self._refusal(str(error)) from error

    @property
    def notes(self) -> dict[str, Any]:
        """Measurements of the programs."""
        return self._manifest.notes

    def _refusal(self, why: str) -> InvalidArgument:
        return InvalidArgument("programs", str(self.folder), why)


def difference(saved: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> str | None:
    """The first difference, as "name is X there, Y is wanted"; None if all are equal. Both dicts are as read
    from JSON.
    """
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
