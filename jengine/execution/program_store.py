"""Saved executables: a folder for each fingerprint, private to its user, every file checked by its hash.

A saved executable is code that runs in this process. So the folder and its files must belong to the user and be
writable by nobody else, and a file whose hash is not the recorded one is not loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from platformdirs import user_cache_path

ENVIRONMENT = "JENGINE_CACHE_DIR"


def default_root() -> Path:
    """JENGINE_CACHE_DIR, or jengine's folder in the user's cache."""
    return Path(os.environ.get(ENVIRONMENT) or user_cache_path("jengine"))


def saved_page_counts(root: Path, fingerprint: str) -> list[int]:
    """For how many pages programs of this fingerprint have been saved."""
    names = (path.name.removeprefix(f"{fingerprint}-") for path in (root / "programs").glob(f"{fingerprint}-*"))
    return [int(name) for name in names if name.isdecimal()]


class ProgramStore:
    """Executables under `root/programs/fingerprint-pages`. Anything that cannot be trusted or read counts as absent."""

    def __init__(self, root: Path, fingerprint: str, num_pages: int, facts: dict[str, object], devices: Sequence[jax.Device]) -> None:
        self.folder = root / "programs" / f"{fingerprint}-{num_pages}"
        self.facts = facts
        self._devices = devices  # that executables are loaded for: there may be more
        self._kept: dict[str, str] = {}  # digests of what was loaded

    def load(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(executables by name, notes); both empty where there is nothing to trust."""
        manifest = self.folder / "manifest.json"
        try:
            if not all(_private(p) for p in (self.folder, manifest)):
                return {}, {}
            index = json.loads(manifest.read_text())
            digests, notes = dict(index["programs"]), dict(index["notes"])
            loaded = {name: self._load_one(name, digest) for name, digest in digests.items()}
        except (OSError, ValueError, KeyError, TypeError):
            return {}, {}
        found = {name: program for name, program in loaded.items() if program is not None}
        self._kept = {name: digests[name] for name in found}
        return found, notes

    def _load_one(self, name: str, digest: str) -> Any | None:
        path = self._file(name, digest)
        if not _private(path):
            return None
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            return None
        try:
            serialized, in_tree, out_tree = pickle.loads(data)
            return serialize_executable.deserialize_and_load(serialized, in_tree, out_tree, execution_devices=self._devices)
        except Exception:  # whatever pickle and the runtime raise for what they cannot read
            return None

    def _file(self, name: str, digest: str) -> Path:
        """Named by its content too: of processes that save at once, each writes files of its own, and the last manifest counts."""
        return self.folder / f"{name}-{digest[:16]}.bin"

    def save(self, programs: dict[str, Any], notes: dict[str, Any]) -> None:
        """Write executables, then the manifest that names them and those that were loaded.

        A loaded executable must not be among them: written again it would lack its functions.

        Raises:
            OSError: the folder cannot be made or written.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        digests = dict(self._kept)
        for name, program in programs.items():
            data = pickle.dumps(serialize_executable.serialize(program))
            digests[name] = hashlib.sha256(data).hexdigest()
            _write(self._file(name, digests[name]), data)
        manifest = {"facts": self.facts, "programs": digests, "notes": notes}
        _write(self.folder / "manifest.json", json.dumps(manifest, indent=1, default=list).encode())


def _private(path: Path) -> bool:
    """Whether it belongs to this user and nobody else may write it."""
    if not hasattr(os, "getuid"):
        return path.exists()
    try:
        facts = path.stat()
    except FileNotFoundError:
        return False
    return facts.st_uid == os.getuid() and not facts.st_mode & 0o022


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
