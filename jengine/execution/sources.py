"""The source files that programs are traced from. Their hash is part of a saved program's identity."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = Path(__file__).parents[2]  # the folder that contains jengine and pallas_kernels
TRACED = "jengine.execution.programs"  # lowers every program
FAMILIES = "jengine/models", "jengine/vision"  # all of their modules count
KERNELS = "pallas_kernels"
INSIDE = {"jengine", "flax", "jax", *sys.stdlib_module_names}  # what defines types of models in this package
_NONCE = secrets.token_bytes()  # of this process

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
    digest, folder = hashlib.sha256(), f"{packages.as_posix()}/"
    for file in source_files(packages):
        name = file.as_posix().removeprefix(folder)  # relative_to is slow
        digest.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def outside_digest(types: Iterable[type]) -> str:
    """A hash of all Python files of the packages that define these types, or of their modules outside of
    packages; "" if this package defines them all. A module without a file, such as a notebook, has another
    hash in each process, so that its programs are not reused.
    """
    names = {base.__module__ for kind in types for base in kind.__mro__}
    roots = {name if name == "__main__" else name.partition(".")[0] for name in names} - INSIDE
    digest = hashlib.sha256()
    for root in sorted(roots):
        module = sys.modules[root]
        folders = [Path(folder) for folder in getattr(module, "__path__", ())]
        files = sorted(file for folder in folders for file in folder.rglob("*.py"))
        if not folders and (file := getattr(module, "__file__", None)):
            files = [Path(file)]
        for file in files:
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
        digest.update(b"" if files else _NONCE)
    return digest.hexdigest() if roots else ""


def source_files(packages: Path = PACKAGES) -> list[Path]:
    """The import closure within jengine of the module that lowers programs, of models and of encoders, and
    all of pallas_kernels with its tables; sorted."""
    kernels = (
        file for file in (packages / KERNELS).rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    return sorted({*kernels, *_closure(packages)})


def _closure(packages: Path) -> set[Path]:
    modules, closure = _modules(packages), set[Path]()
    waiting = [
        *_files(modules, TRACED),
        *(file for name in FAMILIES for file in (packages / name).glob("*.py")),
    ]
    while waiting:
        file = waiting.pop()
        if file not in closure:
            closure.add(file)
            waiting += [other for name in _imported(file.read_bytes()) for other in _files(modules, name)]
    return closure


def _modules(packages: Path) -> dict[str, Path]:
    """The files of jengine by the modules' names: asking for each imported name takes a fifth of a second.

    Without jengine/__init__.py, which imports lazily.
    """
    files = {}
    for folder, _, names in os.walk(packages / "jengine"):
        package = ".".join(Path(folder).relative_to(packages).parts)
        for name in names:
            module, suffix = os.path.splitext(name)
            if suffix == ".py" and module != "__init__":
                files[f"{package}.{module}"] = Path(folder, name)
            elif suffix == ".py" and package != "jengine":
                files[package] = Path(folder, name)
    return files


def _imported(source: bytes) -> Iterator[str]:
    """The names that a module imports: modules, and names that may be modules."""
    for module, names, modules in _IMPORT.findall(source):
        yield from (name.decode() for name in _NAME.findall(modules))
        yield from (f"{module.decode()}.{name.decode()}" for name in _NAME.findall(names))


def _files(modules: dict[str, Path], name: str) -> Iterator[Path]:
    """For jengine.a.b: the files of jengine.a and of jengine.a.b, if they are modules."""
    parts = name.split(".")
    if parts[0] == "jengine":
        for length in range(2, len(parts) + 1):
            file = modules.get(".".join(parts[:length]))
            if file is not None:
                yield file
