"""Saved executables in a folder. Each is written and loaded separately, and checked against its hash (see
program_folder)."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

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
            serialized, in_tree, out_tree = pickle.loads(data)
            return serialize_executable.deserialize_and_load(
                serialized, in_tree, out_tree, execution_devices=devices
            )
        except Exception as error:  # pickle and the runtime raise various errors
            raise UntrustedProgram(f"{path} cannot be loaded: {error}") from error

    def add(self, name: str, program: Any) -> int:
        """Writes an executable that the next manifest will name. Returns its size in bytes.

        Must not be called with a loaded executable: written again, it would lack its functions.

        Raises:
            OSError: the folder cannot be created or written.
        """
        make_private(self.folder)
        data = pickle.dumps(serialize_executable.serialize(program))
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
