"""A folder of saved programs as files: permissions, manifest, lock. Knows nothing about executables; imports
no jax.

A saved executable is code that runs in this process. So the folder and its files must belong to the user, no
one else may be able to write them, and a file's hash must match the one in the manifest.

Kubernetes grants a volume's group (`fsGroup`) write permission to everything in it, whenever it mounts the
volume. If that is all that is wrong and has let in no one else, the permission is removed again; see
`_granted_by_mount`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger("jengine")
MANIFEST = "manifest.json"
LOCK = ".lock"
IN_POD = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets this variable in every container
FS_GROUP = "; if this is a Kubernetes volume with fsGroup, set fsGroupChangePolicy: OnRootMismatch"
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
    """Removes what a mount grants. Raises UntrustedProgram unless this user alone owns and writes it."""
    try:
        status = path.stat()
        if _granted_by_mount(status):
            path.chmod(stat.S_IMODE(status.st_mode) & stat.S_IRWXU)
            status = path.stat()
            if path.is_dir():
                log.info(
                    "removed the write permission that a mount gave to the group of %s%s", path, FS_GROUP
                )
    except OSError as error:
        raise UntrustedProgram(f"{path} cannot be read: {error.strerror}") from None
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        by_group = FS_GROUP if status.st_mode & stat.S_IWGRP else ""
        raise UntrustedProgram(
            f"{path} must belong to you and be writable by no one else: programs are code{by_group}"
        )


def _granted_by_mount(status: os.stat_result) -> bool:
    """Whether the group's write permission can have come from a mount only, and has let in no one else.

    The path must be this user's and closed to all others, and its group one of this process's that has no
    other member. Outside of a pod, where groups are for people to share files, it must also be the user's
    private group, which has the user's number.
    """
    mode = stat.S_IMODE(status.st_mode)
    if (
        not hasattr(os, "getuid")
        or status.st_uid != os.getuid()
        or not mode & stat.S_IWGRP
        or mode & stat.S_IRWXO
    ):
        return False
    alone = status.st_gid in {os.getgid(), *os.getgroups()} and not _others_in(status.st_gid)
    return alone and (status.st_gid == os.getuid() or IN_POD in os.environ)


def _others_in(group: int) -> bool:
    """Whether the group has members other than this user."""
    import grp
    import pwd

    try:
        members = {*grp.getgrgid(group).gr_mem}
    except KeyError:  # Kubernetes' groups usually have no name, and no members
        return False
    try:
        return bool(members - {pwd.getpwuid(os.getuid()).pw_name})
    except KeyError:
        return bool(members)


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

    @property
    def held(self) -> bool:
        return self._handle is not None

    def acquire(self) -> bool:
        """Tries to acquire the lock, unless it is held already. Returns False while another process or thread
        holds it. Creates the folder if needed.

        Raises:
            OSError: the folder cannot be created or written.
        """
        if self.held:
            return True
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            handle = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # the folder was removed in between
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # without locks, simultaneous starts compile the same programs, which is safe
            if error.errno not in NO_LOCKS:
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
    """Removes all files except these programs, such as incomplete, replaced or untrusted ones. Requires the
    lock.

    Args:
        programs: hashes by name.
    """
    names = {LOCK, *(program_file(folder, name, digest).name for name, digest in programs.items())}
    if programs:
        names.add(MANIFEST)
    for file in folder.iterdir():
        if file.name not in names:
            with contextlib.suppress(OSError):
                file.unlink()
