"""A folder of saved programs as files: permissions, manifest, lock. Knows nothing about executables; imports no jax.

A saved executable is code that runs in this process. So the folder and its files must belong to the user, no
one else may be able to write them, and a file's hash must match the one in the manifest.
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
NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP  # on file systems without flock


class UntrustedProgram(Exception):
    """The reason why a saved file is not trusted."""


class Manifest(NamedTuple):
    """The manifest of a folder of programs.

    Attributes:
        identity: ExecutionSpec.identity() of the programs, as JSON.
        programs: hashes by name.
        notes: measurements of the programs, as JSON.
    """

    identity: dict[str, Any]
    programs: dict[str, str]
    notes: dict[str, Any]


def read_manifest(folder: Path) -> Manifest:
    """Reads the folder's manifest.

    Raises:
        UntrustedProgram: there is no manifest, it is damaged, or other users may write it or its folder.
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
    """Raises OSError if it cannot be written; the old manifest is kept in this case."""
    write_private(folder / MANIFEST, json.dumps(manifest._asdict(), indent=1, default=list).encode())


def program_file(folder: Path, name: str, digest: str) -> Path:
    """The file name includes the hash, so a manifest can never refer to another program's bytes."""
    return folder / f"{name}-{digest[:16]}.bin"


def make_private(folder: Path) -> None:
    """Raises OSError if the folder cannot be created or belongs to another user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def must_be_private(path: Path) -> None:
    """Raises UntrustedProgram unless the path belongs to this user and no one else may write it."""
    try:
        stat = path.stat()
    except OSError as error:
        raise UntrustedProgram(f"{path} cannot be read: {error.strerror}") from None
    if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o022):
        raise UntrustedProgram(f"{path} must belong to you and be writable by no one else: programs are code")


def write_private(path: Path, data: bytes) -> None:
    """Writes a file atomically, readable by its owner only. Raises OSError if it cannot be written."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class FolderLock:
    """Only its holder writes and removes the folder's files; readers do not need it. It is released when the
    process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Tries to acquire the lock. Returns False while another process or thread holds it. Creates the folder
        if needed.

        Raises:
            OSError: the folder cannot be created or written.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            handle = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # the folder was removed in between
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:  # without locks, simultaneous starts compile the same programs, which is safe
                os.close(handle)
                if isinstance(error, BlockingIOError):
                    return False
                raise
        if os.fstat(handle).st_nlink == 0:  # removed by the previous holder: this lock guards nothing
            os.close(handle)
            return False
        self._handle = handle
        return True

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def touch(folder: Path) -> None:
    """Marks the folder as used now, if it can be written."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def tidy(folder: Path, programs: dict[str, str]) -> None:
    """Removes all files except these programs, such as incomplete, replaced or untrusted ones. Requires the lock.

    Args:
        programs: hashes by name.
    """
    kept = {LOCK, *(program_file(folder, name, digest).name for name, digest in programs.items())}
    if programs:
        kept.add(MANIFEST)
    for file in folder.iterdir():
        if file.name not in kept:
            with contextlib.suppress(OSError):
                file.unlink()
