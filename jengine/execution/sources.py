"""The source files that programs are traced from. Their hash is part of a saved program's identity."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGES = Path(__file__).parents[2]  # the folder that contains jengine and pallas_kernels
TRACED = "jengine.execution.programs"  # lowers every program
FAMILIES = "jengine/models", "jengine/vision"  # all of their modules count
KERNELS = "pallas_kernels"

# Import statements anywhere in a file. A regular expression, since parsing the files takes a fifth of a
# second at every start; a test compares the two. It may match too much (in a docstring), which only costs a
# compilation, but never too little.
_IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))", re.MULTILINE
)
_NAME = re.compile(rb"[\w.]+")


@functools.cache
def source_digest(packages: Path = PACKAGES) -> str:
    """A hash of the names and contents of `source_files`."""
    digest = hashlib.sha256()
    for file in source_files(packages):
        digest.update(
            file.relative_to(packages).as_posix().encode()
            + b"\0"
            + hashlib.sha256(file.read_bytes()).digest()
        )
    return digest.hexdigest()


def source_files(packages: Path = PACKAGES) -> list[Path]:
    """The import closure within jengine of the module that lowers programs, of models and of encoders, and
    all of pallas_kernels with its tables; sorted."""
    kernels = (
        file for file in (packages / KERNELS).rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    return sorted({*kernels, *_closure(packages)})


def _closure(packages: Path) -> set[Path]:
    found: set[Path] = set()
    waiting = [
        *_files(packages, TRACED),
        *(file for name in FAMILIES for file in (packages / name).glob("*.py")),
    ]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += [other for name in _imported(file.read_bytes()) for other in _files(packages, name)]
    return found


def _imported(source: bytes) -> Iterator[str]:
    """The names that a module imports: modules, and names that may be modules."""
    for module, names, modules in _IMPORT.findall(source):
        yield from (name.decode() for name in _NAME.findall(modules))
        yield from (f"{module.decode()}.{name.decode()}" for name in _NAME.findall(names))


def _files(packages: Path, name: str) -> Iterator[Path]:
    """For jengine.a.b: the files of jengine.a and of jengine.a.b, if they are modules.

    Without jengine/__init__.py, which imports lazily.
    """
    parts = name.split(".")
    if parts[0] != "jengine":
        return
    for length in range(2, len(parts) + 1):
        path = packages.joinpath(*parts[:length])
        yield from (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file())
