"""A folder of saved programs as files: who may write it, its manifest, its lock. Knows nothing of executables, and imports no jax.

A saved executable is code that runs in this process. So the folder and its files must belong to the user and be
writable by no one else, and a file counts only with the hash that the manifest records.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "manifest.json"
LOCK = ".lock"
NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP  # of file systems without flock


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


def read_manifest(folder: Path) -> Manifest:
    """What the folder holds.

    Raises:
        UntrustedProgram: there is no manifest, it is damaged, or others than the user may write it or its folder.
    """
    file = folder / MANIFEST
    for path in (folder, file):
        must_be_private(path)
    try:
        index = json.loads(file.read_text())
        return Manifest(dict(index["identity"]), dict(index["programs"]), dict(index["notes"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UntrustedProgram(f"{file} cannot be read: {error!r}") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Raises OSError if it cannot be written; the old one stays then."""
    write_private(folder / MANIFEST, json.dumps(manifest._asdict(), indent=1, default=list).encode())


def program_file(folder: Path, name: str, digest: str) -> Path:
    """Named by its content too, so that no manifest ever names another program's bytes."""
    return folder / f"{name}-{digest[:16]}.bin"


def make_private(folder: Path) -> None:
    """Raises OSError if the folder cannot be made, or is another user's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def must_be_private(path: Path) -> None:
    """Raises UntrustedProgram unless it belongs to this user and nobody else may write it."""
    try:
        stat = path.stat()
    except OSError as error:
        raise UntrustedProgram(f"{path} cannot be read: {error.strerror}") from None
    if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o022):
        raise UntrustedProgram(f"{path} must belong to you and be writable by no one else: programs are code")


def write_private(path: Path, data: bytes) -> None:
    """Whole or not at all, readable by its owner only. Raises OSError if it cannot be written."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class FolderLock:
    """Who holds it alone writes and removes the folder's files; those who load do not ask for it. It ends with its process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Whether it is held now; False while another process, or another thread of this one, holds it. Makes the folder.

        Raises:
            OSError: the folder cannot be made or written.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            handle = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # the folder was removed in between
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:  # without locks, starts at once compile alike: all files are written whole
                os.close(handle)
                if isinstance(error, BlockingIOError):
                    return False
                raise
        if os.fstat(handle).st_nlink == 0:  # removed, by who held it before: it guards nothing
            os.close(handle)
            return False
        self._handle = handle
        return True

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def touch(folder: Path) -> None:
    """Mark it as used now; where that cannot be written, it stays as it is."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def tidy(folder: Path, programs: dict[str, str]) -> None:
    """Remove all but these programs: what a killed process was writing, what was replaced, what cannot be trusted. For the lock's holder.

    Args:
        programs: digests by name.
    """
    kept = {LOCK, *(program_file(folder, name, digest).name for name, digest in programs.items())}
    if programs:
        kept.add(MANIFEST)
    for file in folder.iterdir():
        if file.name not in kept:
            with contextlib.suppress(OSError):
                file.unlink()
