"""The user's cache of programs. Each is saved as soon as it is compiled; processes that start together share
the work.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jengine.base.progress import Progress, progress_bar
from jengine.execution.cache_folders import trim
from jengine.execution.program_folder import MANIFEST, FolderLock, UntrustedProgram, make_private, tidy, touch
from jengine.execution.program_store import ProgramStore

log = logging.getLogger("jengine")
POLL = 0.2  # seconds between checks for programs that another process has compiled
WAITING = "waiting for another process that is compiling the same programs"
Loaded = tuple[dict[str, Any], dict[str, Any]]  # executables by name, notes


class ProgramCache(ProgramStore):
    """The cache's folder for one fingerprint. Programs that cannot be trusted or read count as absent; write
    errors warn.

    Args:
        root: the cache's root folder.
        name: the folder's name.
        max_bytes: maximum size of the cache. Above it, the least recently used folders are removed.
        wait: whether to wait for another process that is compiling the same programs. Processes that share an
            engine must not, since two engines could wait for each other.
    """

    def __init__(self, root: Path, name: str, *, max_bytes: int, wait: bool = True) -> None:
        super().__init__(root / "programs" / name)
        self._root, self._max_bytes, self._wait = root, max_bytes, wait
        self._logged: set[str] = set()  # reasons for rejected programs
        self._refused: set[str] = set()  # hashes of files that could not be loaded
        self._writes = False  # True while the lock is held and writing succeeds

    def load(
        self,
        names: Iterable[str],
        identity: dict[str, object],
        devices: Sequence[jax.Device],
        before: Callable[[], object],
    ) -> Loaded:
        """(the named executables found here, notes).

        Args:
            identity: not used, since the folder's name contains its fingerprint.
            devices: the devices that they will run on; there may be others.
            before: is called before any is loaded, if one is here.
        """
        found: dict[str, Any] = {}
        return found, self._load(names, found, devices, before)

    def _load(
        self,
        names: Iterable[str],
        found: dict[str, Any],
        devices: Sequence[jax.Device],
        before: Callable[[], object],
    ) -> dict[str, Any]:
        """Adds named executables to `found` that are not yet in it. Returns the notes."""
        try:
            manifest = self.manifest()
        except UntrustedProgram as error:
            if (self.folder / MANIFEST).exists():  # otherwise nothing has been saved yet
                self._log_rejected(error)
            return {}
        names = list(names)
        if not manifest.programs.keys().isdisjoint(names):
            before()
        for name in names:
            digest = str(manifest.programs.get(name))
            if name in found or digest in self._refused:
                continue
            try:
                found[name], self._digests[name] = self.load_one(name, manifest.programs, devices), digest
            except UntrustedProgram as error:
                self._refused.add(digest)
                if name in manifest.programs:
                    self._log_rejected(error)
        if found:
            touch(self.folder)
        return manifest.notes

    def _log_rejected(self, error: UntrustedProgram) -> None:
        """Logs once, since the folder may be read many times while another process fills it."""
        if str(error) not in self._logged:
            self._logged.add(str(error))
            log.warning("saved programs are rejected and compiled again: %s", error)

    @contextmanager
    def filling(
        self,
        names: list[str],
        devices: Sequence[jax.Device],
        before: Callable[[], object],
        *,
        progress: Progress,
    ) -> Iterator[Loaded]:
        """A context in which missing programs are compiled and passed to `keep`.

        Yields, like `load`, those that another process has compiled meanwhile. One process at a time fills a
        folder. Others wait, load each program as it is saved, and take over if the first one ends.

        Args:
            before: see `load`.
        """
        lock = FolderLock(self.folder)
        found: dict[str, Any] = {}
        notes: dict[str, Any] = {}
        try:
            with progress_bar(
                show=progress, total=len(names), desc=WAITING, unit="program", delay=POLL
            ) as bar:
                while not (held := lock.acquire()) and self._wait and len(found) < len(names):
                    time.sleep(POLL)
                    notes = self._load(names, found, devices, before)
                    bar.n = len(found)
                    bar.refresh()
            if held:
                notes = self._load(names, found, devices, before)  # programs saved last
                tidy(self.folder, self._digests)
                make_private(self.folder)  # not earlier: a folder that was not private must not be trusted
                self._writes = True
        except OSError as error:
            self._cannot_write(error)
        try:
            yield found, notes
            if self._writes:
                trim(self._root, self._max_bytes, keep=self.folder)
        finally:
            self._writes = False
            lock.release()

    def keep(self, name: str, program: Any, identity: dict[str, object], notes: dict[str, Any]) -> None:
        """Saves a newly compiled executable immediately, so that neither Ctrl-C nor a crash loses it. Used
        within `filling`."""
        if self._writes:
            try:
                self.add(name, program)
                self.finish(identity, notes)
            except OSError as error:
                self._cannot_write(error)

    def _cannot_write(self, error: OSError) -> None:
        self._writes = False
        warnings.warn(
            f"compiled programs could not be saved, the next start compiles them again: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
