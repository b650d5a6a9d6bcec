"""Saved executables in a folder: written and loaded one by one, every file checked by its hash (see program_folder)."""

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
        self._digests: dict[str, str] = {}  # of what was loaded or written

    def manifest(self) -> Manifest:
        """What the folder holds. Raises UntrustedProgram, see read_manifest."""
        return read_manifest(self.folder)

    def load_one(self, name: str, digests: dict[str, str], devices: Sequence[jax.Device]) -> Any:
        """An executable.

        Args:
            devices: that it will run on; there may be more.

        Raises:
            UntrustedProgram: it is missing, others may write its file, its content is not what was saved, or the runtime cannot read it.
        """
        if name not in digests:
            raise UntrustedProgram(f"{self.folder / MANIFEST} names no {name}")
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
            return serialize_executable.deserialize_and_load(serialized, in_tree, out_tree, execution_devices=devices)
        except Exception as error:  # whatever pickle and the runtime raise for what they cannot read
            raise UntrustedProgram(f"{path} cannot be loaded: {error}") from error

    def add(self, name: str, program: Any) -> int:
        """Write an executable, which the next manifest names; returns its bytes. A loaded one, written again, would lack its functions.

        Raises:
            OSError: the folder cannot be made or written.
        """
        make_private(self.folder)
        data = pickle.dumps(serialize_executable.serialize(program))
        digest = hashlib.sha256(data).hexdigest()
        write_private(program_file(self.folder, name, digest), data)
        self._digests[name] = digest
        return len(data)

    def finish(self, identity: dict[str, object], notes: dict[str, Any]) -> None:
        """Write the manifest, which names what was added and what was loaded.

        Raises:
            OSError: it cannot be written.
        """
        write_manifest(self.folder, Manifest(identity, self._digests, notes))
