"""The code of a CPU's kernels, and lowered kernels of a GPU, kept beside saved programs, so that a start
compiles or lowers none of them.

It is code that runs in this process, so the rules of program_folder hold: the folder and its files must
belong to the user, no one else may be able to write them, and a file's content must match the hash at its
beginning.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import shutil
import time
from pathlib import Path

from jengine.execution.cache_folders import STALE, kernel_folders
from jengine.execution.program_folder import (
    UntrustedProgram,
    make_private,
    must_be_private,
    touch,
    write_private,
)
from jengine.execution.sources import source_digest
from pallas_kernels.compilation import lowered

HASH = 32  # bytes at the beginning of a file
log = logging.getLogger("jengine")


class KernelObjects:
    """Code in files by the kernel's name. What cannot be trusted, read or written is compiled again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str) -> bytes | None:
        file = self._folder / f"{name}.o"
        if not file.exists():
            return None
        try:
            for path in (self._folder, file):
                must_be_private(path)
            data = file.read_bytes()
            if hashlib.sha256(data[HASH:]).digest() != data[:HASH]:
                raise UntrustedProgram(f"{file} is damaged: its hash is not the recorded one")
        except (OSError, UntrustedProgram) as error:
            log.warning("a saved kernel is rejected and compiled again: %s", error)
            return None
        return data[HASH:]

    def save(self, name: str, code: bytes) -> None:
        # if it cannot be written, programs cannot be saved either, and that raises a warning
        with contextlib.suppress(OSError):
            try:
                must_be_private(self._folder)
            except UntrustedProgram:
                shutil.rmtree(self._folder, ignore_errors=True)  # others may have put files there
                make_private(self._folder)
            write_private(self._folder / f"{name}.o", hashlib.sha256(code).digest() + code)


def keep_kernels(root: Path) -> None:
    """Keeps a CPU's kernels of this process in the cache."""
    from pallas_kernels.llvm import native

    native.keep_objects(KernelObjects(_folder(root, "llvmlite")))


def keep_lowered(root: Path) -> None:
    """Keeps a GPU's lowered kernels in the cache, for programs of all engines and processes."""
    lowered.keep_modules(KernelObjects(_folder(root, "jax", "jaxlib")))


def _folder(root: Path, *packages: str) -> Path:
    """The folder for these sources and versions. Removes those that have long been out of use."""
    facts = [source_digest(), *map(importlib.metadata.version, packages)]
    folder = root / "kernels" / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    touch(folder)
    for other in kernel_folders(root):
        with contextlib.suppress(OSError):
            if other != folder and time.time() - other.stat().st_mtime > STALE:
                shutil.rmtree(other)
    return folder
