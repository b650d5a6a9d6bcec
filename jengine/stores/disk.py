"""Pages in a folder, one file each."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from jengine.stores.memory import MAX_PAGE, NAME_BYTES, Part, size_of

MAGIC = b"jengpg01"
DIGEST_BYTES = 32
HEAD_BYTES = len(MAGIC) + NAME_BYTES + DIGEST_BYTES
SUFFIX = ".page"
UNFINISHED = ".new"
OLD_SECONDS = 3600.0  # an unfinished file this old is of a process that has ended
SCANS = 16  # the folder is looked at again after writing this part of its bytes: others may write to it


class DiskStore:
    """At most `max_bytes` bytes of pages in a folder that only its owner may read. The folder outlives the
    process. Several processes may share it.

    A file holds the page's name and a digest of its contents. It is written under another name and then
    renamed, so a process that ends while it writes leaves no page. A file whose contents do not match its
    digest is removed, and its page is missing.

    The time of a file's last use is its modification time.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.used = 0  # bytes
        self._written = 0  # bytes since the last scan
        self._numbers = itertools.count()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._scan()

    def __len__(self) -> int:
        return len(self._sizes)

    def find(self, names: Sequence[bytes], wait: float = 0.0) -> list[bool]:
        return [name in self._sizes or self._path(name).exists() for name in names]

    def load(self, names: Sequence[bytes]) -> Iterator[bytes | None]:
        return map(self._load, names)

    def _load(self, name: bytes) -> bytes | None:
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            with self._lock:
                self.used -= self._sizes.pop(name, 0)
            return None
        page = memoryview(data)[HEAD_BYTES:]
        if data[:HEAD_BYTES] != _head(name, [page]):
            self.drop(name)
            return None
        self._touch(path)
        self._note(name, len(data))
        return bytes(page)

    def keep(self, name: bytes, page: Sequence[Part]) -> bool:
        size = HEAD_BYTES + size_of(page)
        if size > min(self.max_bytes, MAX_PAGE):
            return False
        path = self._path(name)
        if path.exists():
            self._touch(path)
            self._note(name, size)
            return True
        with self._lock:
            if self._written > self.max_bytes // SCANS:
                self._scan()
            while self._sizes and self.used + size > self.max_bytes:
                self._remove(next(iter(self._sizes)))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        new = self.folder / f"{os.getpid()}-{next(self._numbers)}{UNFINISHED}"
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_head(name, page))
                for part in page:
                    file.write(part)
            self._touch(new)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        self._note(name, size, written=size)
        return True

    def drop(self, name: bytes) -> None:
        with self._lock:
            self._remove(name)

    def close(self) -> None:
        """Does nothing: the folder outlives the store."""

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self.folder / text[:2] / f"{text}{SUFFIX}"

    def _touch(self, path: Path) -> None:
        now = time.time_ns()  # finer than the file system's own clock
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now))

    def _note(self, name: bytes, size: int, written: int = 0) -> None:
        """Note that a page was used now, and how many bytes of it were written."""
        with self._lock:
            self.used += size - self._sizes.pop(name, 0)
            self._sizes[name] = size
            self._written += written

    def _remove(self, name: bytes) -> None:
        self.used -= self._sizes.pop(name, 0)
        self._path(name).unlink(missing_ok=True)

    def _scan(self) -> None:
        """Looks at what the folder holds, by time of use. Removes what ended processes left unfinished."""
        pages = list[tuple[int, bytes, int]]()
        for path in self.folder.glob(f"??/*{SUFFIX}"):
            with contextlib.suppress(OSError, ValueError):
                name, facts = bytes.fromhex(path.stem), path.stat()
                if len(name) == NAME_BYTES:
                    pages.append((facts.st_mtime_ns, name, facts.st_size))
        for path in self.folder.glob(f"*{UNFINISHED}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - OLD_SECONDS:
                    path.unlink()
        self._sizes = OrderedDict((name, size) for _, name, size in sorted(pages))
        self.used, self._written = sum(self._sizes.values()), 0
        while self.used > self.max_bytes:
            self._remove(next(iter(self._sizes)))


def _head(name: bytes, page: Sequence[Part]) -> bytes:
    digest = hashlib.blake2b(name, digest_size=DIGEST_BYTES)
    for part in page:
        digest.update(part)
    return MAGIC + name + digest.digest()
