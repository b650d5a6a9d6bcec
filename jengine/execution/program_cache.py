"""The user's cache of programs. Each is saved once compiled; processes that start together share the work."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jengine.execution.cache_folders import trim
from jengine.execution.program_folder import (
    MANIFEST,
    FolderLock,
    UntrustedProgram,
    make_private,
    program_file,
    tidy,
    touch,
)
from jengine.execution.program_store import ProgramStore

log = logging.getLogger("jengine")
POLL = 0.2  # seconds between checks for programs that another process has compiled
WAITING = "waiting for another process that is compiling the same programs"


class ProgramCache(ProgramStore):
    """The cache's folder for one fingerprint. Programs that cannot be trusted or read count as absent; write
    errors warn.

    One process at a time fills the folder: the holder of its lock. Others wait, load each program as it is
    saved, and take over if the holder ends.

    Args:
        root: the cache's root folder.
        name: the folder's name.
        max_bytes: maximum size of the cache. Above it, the least recently used folders are removed.
        wait: whether to wait for another process that is compiling the same programs. Processes that share an
            engine must not, since two engines could wait for each other.

    Attributes:
        notes: measurements of the folder's programs, as far as they are known here.
    """

    def __init__(self, root: Path, name: str, *, max_bytes: int, wait: bool = True) -> None:
        super().__init__(root / "programs" / name)
        self.notes: dict[str, Any] = {}
        self._root, self._max_bytes, self._wait = root, max_bytes, wait
        self._lock, self._holders = FolderLock(self.folder), 0
        self._logged: set[str] = set()  # reasons for rejected programs
        self._refused: set[str] = set()  # hashes of files that could not be loaded
        self._writes = False  # True while the lock is held and writing succeeds
        self._warned = False

    def load(
        self,
        names: Iterable[str],
        identity: dict[str, object],
        devices: Sequence[jax.Device],
        before: Callable[[], object],
    ) -> Iterator[tuple[str, Any]]:
        """Yields each of the named executables that is found here, with its name.

        Args:
            identity: not used, since the folder's name contains its fingerprint.
            devices: the devices that they will run on; there may be others.
            before: is called before any is loaded, if one is here.
        """
        programs = self._named()
        here = [name for name in names if name in programs and programs[name] not in self._refused]
        if not here:
            return
        before()
        for name, done in self.load_each(here, programs, devices):
            try:
                program = done.result()
            except UntrustedProgram as error:
                self._refused.add(programs[name])
                self._log_rejected(error)
                continue
            self._digests[name] = programs[name]
            yield name, program
        touch(self.folder)

    def missing(self, names: Iterable[str]) -> list[str]:
        """The names that no saved program has."""
        programs = self._named()
        return [name for name in names if name not in programs]

    def _named(self) -> dict[str, str]:
        """Hashes of the saved programs by name. Adds what the folder notes to `notes`."""
        try:
            manifest = self.manifest()
        except UntrustedProgram as error:
            if (self.folder / MANIFEST).exists():  # otherwise nothing has been saved yet
                self._log_rejected(error)
            return {}
        self.notes = manifest.notes | {"memory": _memory(manifest.notes) | _memory(self.notes)}
        return {name: str(digest) for name, digest in manifest.programs.items()}

    def _log_rejected(self, error: UntrustedProgram) -> None:
        """Logs once, since the folder may be read many times while another process fills it."""
        if str(error) not in self._logged:
            self._logged.add(str(error))
            log.warning("saved programs are rejected and compiled again: %s", error)

    # --- filling the folder -----------------------------------------------------------------------

    def hold(self) -> bool:
        """Takes the folder's lock. Returns whether there is nobody to wait for: this process has the lock, or
        must not wait, or cannot write. May be called repeatedly; each call that returns True needs a
        `release`.
        """
        try:
            if not self._lock.acquire() and self._wait:
                return False
        except OSError as error:
            self._cannot_write(error)
        self._holders += 1
        return True

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._writes = False
            self._lock.release()

    def expects(self, names: Iterable[str]) -> bool:
        """Whether the lock's holder may still save one of these programs; its options may differ."""
        self._named()
        coming = self.notes.get("coming")
        return coming is None or not {*coming}.isdisjoint(names)

    def begin(self) -> None:
        """Prepares to save programs, if this process has the lock. What others have saved is kept, whether it
        was loaded here or not; files that no manifest names are removed.
        """
        if not self._lock.held:
            return
        try:
            saved = {name: digest for name, digest in self._named().items() if digest not in self._refused}
            self._digests = {
                name: digest
                for name, digest in (self._digests | saved).items()
                if program_file(self.folder, name, digest).exists()
            }
            tidy(self.folder, self._digests)
            make_private(self.folder)  # not earlier: a folder that was not private must not be trusted
            self._writes = True
        except OSError as error:
            self._cannot_write(error)

    @property
    def writes(self) -> bool:
        """Whether `keep` saves programs."""
        return self._writes

    def keep(
        self, name: str, data: bytes, identity: dict[str, object], memory: dict[str, Any], coming: list[str]
    ) -> None:
        """Saves a newly compiled and packed executable immediately, so that neither Ctrl-C nor a crash loses
        it. Used after `begin`.

        Args:
            memory: memory of programs, for the notes.
            coming: names of the programs that will be saved after it.
        """
        self.notes = self.notes | {"memory": _memory(self.notes) | memory, "coming": coming}
        if self._writes:
            try:
                self.add(name, data)
                self.finish(identity, self.notes)
            except OSError as error:
                self._cannot_write(error)

    def end(self) -> None:
        """Removes other folders above the cache's size, if programs were saved."""
        if self._writes:
            trim(self._root, self._max_bytes, keep=self.folder)

    def _cannot_write(self, error: OSError) -> None:
        self._writes = False
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"compiled programs could not be saved, the next start compiles them again: {error}",
                RuntimeWarning,
                stacklevel=4,
            )


def _memory(notes: dict[str, Any]) -> dict[str, Any]:
    memory: dict[str, Any] = notes.get("memory", {})
    return memory
