"""Saved executables in a folder. Each is written and loaded separately, and checked against its hash (see
program_folder)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import lzma
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.devices.device_defaults import CORES
from jengine.execution.program_folder import (
    MANIFEST,
    Manifest,
    UntrustedProgram,
    make_private,
    must_be_private,
    program_file,
    read_manifest,
    write_manifest,
    write_private,
)

LOADERS = min(4, CORES)  # threads that load programs
XZ = b"\xfd7zXZ"  # the first bytes of compressed data


def packed(program: Any, platform: str) -> bytes:
    """A newly compiled executable for this platform as bytes.

    Must not be called with a loaded executable: packed again, it would lack its functions.
    """
    data = pickle.dumps(serialize_executable.serialize(program))
    # a GPU's repeats the modules of kernels in each layer: a tenth remains; a CPU's is small
    return data if platform == "cpu" else lzma.compress(data, preset=1)


def unpacked(data: bytes, devices: Sequence[jax.Device]) -> Any:
    """The executable, loaded on its devices. pickle and the runtime raise various errors."""
    serialized, in_tree, out_tree = pickle.loads(lzma.decompress(data) if data.startswith(XZ) else data)
    return serialize_executable.deserialize_and_load(serialized, in_tree, out_tree, execution_devices=devices)


class ProgramStore:
    """Executables in a folder, with a manifest that names them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._digests: dict[str, str] = {}  # of programs loaded or written

    def manifest(self) -> Manifest:
        """The folder's manifest. Raises UntrustedProgram; see read_manifest."""
        return read_manifest(self.folder)

    def load_one(self, name: str, digests: dict[str, str], devices: Sequence[jax.Device]) -> Any:
        """Loads an executable.

        Args:
            devices: the devices that it will run on; there may be others.

        Raises:
            UntrustedProgram: it is missing, other users may write its file, the hash differs, or the runtime
                cannot read it.
        """
        if name not in digests:
            raise UntrustedProgram(f"{self.folder / MANIFEST} does not name {name}")
        digest = str(digests[name])
        path = program_file(self.folder, name, digest)
        must_be_private(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UntrustedProgram(f"{path} cannot be read: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise UntrustedProgram(f"{path} is damaged: its hash is not the recorded one")
        try:
            return unpacked(data, devices)
        except Exception as error:
            raise UntrustedProgram(f"{path} cannot be loaded: {error}") from error

    def load_each(
        self, names: Iterable[str], digests: dict[str, str], devices: Sequence[jax.Device]
    ) -> Iterator[tuple[str, Future[Any]]]:
        """Loads executables in threads, see `load_one`. Yields names with these or errors, as they end."""
        with ThreadPoolExecutor(LOADERS, "load programs") as pool:
            try:
                loading = {pool.submit(self.load_one, name, digests, devices): name for name in names}
                for done in as_completed(loading):
                    yield loading[done], done
            finally:
                pool.shutdown(cancel_futures=True)

    def add(self, name: str, data: bytes) -> int:
        """Writes a packed executable that the next manifest will name. Returns its size in bytes.

        Raises:
            OSError: the folder cannot be created or written.
        """
        make_private(self.folder)
        digest = hashlib.sha256(data).hexdigest()
        write_private(program_file(self.folder, name, digest), data)
        self._digests[name] = digest
        return len(data)

    def finish(self, identity: dict[str, object], notes: dict[str, Any]) -> None:
        """Writes the manifest, which names all programs added or loaded.

        Raises:
            OSError: it cannot be written.
        """
        write_manifest(self.folder, Manifest(identity, self._digests, notes))


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
    """The first difference, as "name is X there, Y is wanted", of two dicts read from JSON; None: equal."""
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
