"""Saved executables in a folder. Each is written and loaded separately, and checked against its hash (see
program_folder)."""

from __future__ import annotations

import hashlib
import lzma
import pickle
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

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
    """The executable, loaded on the devices that it will run on; there may be others. pickle and the runtime
    raise various errors.
    """
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
        """Loads executables in a few threads, see `load_one`. Yields each name with its executable or error,
        in the order in which they end.
        """
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
