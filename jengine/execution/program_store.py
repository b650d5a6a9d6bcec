"""Saved executables: a folder for each fingerprint, or one that was asked for; private to its user, every file checked by its hash.

A saved executable is code that runs in this process. So the folder and its files must belong to the user and be
writable by nobody else, and a file whose hash is not the recorded one is not loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from platformdirs import user_cache_path

ENVIRONMENT = "JENGINE_CACHE_DIR"
MANIFEST = "manifest.json"


def default_root() -> Path:
    """JENGINE_CACHE_DIR, or jengine's folder in the user's cache."""
    return Path(os.environ.get(ENVIRONMENT) or user_cache_path("jengine"))


def saved_page_counts(root: Path, fingerprint: str) -> list[int]:
    """For how many pages programs of this fingerprint have been saved."""
    names = (path.name.removeprefix(f"{fingerprint}-") for path in (root / "programs").glob(f"{fingerprint}-*"))
    return [int(name) for name in names if name.isdecimal()]


class UntrustedProgram(Exception):
    """Why a saved file is not taken."""


class Manifest(NamedTuple):
    """What a folder of programs says of itself.

    Attributes:
        identity: ExecutionSpec.identity() of those who saved it, as JSON has them.
        programs: digests by name.
        notes: measured of the programs, as JSON has it.
    """

    identity: dict[str, Any]
    programs: dict[str, str]
    notes: dict[str, Any]


class ProgramStore:
    """Executables in a folder, with a manifest that names them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._digests: dict[str, str] = {}  # of what was loaded or written

    def manifest(self) -> Manifest:
        """What the folder holds.

        Raises:
            UntrustedProgram: there is no manifest, it is damaged, or others than the user may write it or its folder.
        """
        file = self.folder / MANIFEST
        for path in (self.folder, file):
            _must_be_private(path)
        try:
            index = json.loads(file.read_text())
            return Manifest(dict(index["identity"]), dict(index["programs"]), dict(index["notes"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UntrustedProgram(f"{file} cannot be read: {error!r}") from None

    def load(
        self, names: Iterable[str], identity: dict[str, object], devices: Sequence[jax.Device]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(those of the named executables that are here, notes). What cannot be trusted or read counts as absent.

        Args:
            identity: of what they are wanted for. Not looked at: in the cache, the folder is named by them.
            devices: that they will run on; there may be more.
        """
        try:
            manifest = self.manifest()
        except UntrustedProgram:
            return {}, {}
        found = {}
        for name in names:
            with contextlib.suppress(UntrustedProgram):
                found[name] = self.load_one(name, manifest.programs, devices)
        self._digests = {name: manifest.programs[name] for name in found}
        return found, manifest.notes

    def load_one(self, name: str, digests: dict[str, str], devices: Sequence[jax.Device]) -> Any:
        """An executable.

        Raises:
            UntrustedProgram: it is missing, others may write its file, its content is not what was saved, or the runtime cannot read it.
        """
        if name not in digests:
            raise UntrustedProgram(f"{self.folder / MANIFEST} names no {name}")
        digest = str(digests[name])
        path = self._file(name, digest)
        _must_be_private(path)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise UntrustedProgram(f"{path} is damaged: its hash is not the recorded one")
        try:
            serialized, in_tree, out_tree = pickle.loads(data)
            return serialize_executable.deserialize_and_load(serialized, in_tree, out_tree, execution_devices=devices)
        except Exception as error:  # whatever pickle and the runtime raise for what they cannot read
            raise UntrustedProgram(f"{path} cannot be loaded: {error}") from error

    def _file(self, name: str, digest: str) -> Path:
        """Named by its content too: of processes that save at once, each writes files of its own, and the last manifest counts."""
        return self.folder / f"{name}-{digest[:16]}.bin"

    def add(self, name: str, program: Any) -> int:
        """Write an executable, which the next manifest names; returns its bytes. A loaded one, written again, would lack its functions.

        Raises:
            OSError: the folder cannot be made or written.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        data = pickle.dumps(serialize_executable.serialize(program))
        self._digests[name] = hashlib.sha256(data).hexdigest()
        _write(self._file(name, self._digests[name]), data)
        return len(data)

    def finish(self, identity: dict[str, object], notes: dict[str, Any]) -> None:
        """Write the manifest, which names what was added and what was loaded.

        Raises:
            OSError: it cannot be written.
        """
        manifest = Manifest(identity, self._digests, notes)._asdict()
        _write(self.folder / MANIFEST, json.dumps(manifest, indent=1, default=list).encode())


def _must_be_private(path: Path) -> None:
    """Raises UntrustedProgram unless it belongs to this user and nobody else may write it."""
    try:
        stat = path.stat()
    except OSError as error:
        raise UntrustedProgram(f"{path} cannot be read: {error.strerror}") from None
    if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o022):
        raise UntrustedProgram(f"{path} must belong to you and be writable by nobody else: programs are code")


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, readable by its owner only."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
