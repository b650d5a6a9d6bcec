"""The cache of programs as folders on disk: its location, contents and clean-up. Imports no jax."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from jengine.base.options import parse_bytes
from jengine.execution.program_folder import MANIFEST, FolderLock, Manifest, UntrustedProgram, read_manifest

ROOT_VARIABLE, LIMIT_VARIABLE = "JENGINE_CACHE_DIR", "JENGINE_CACHE_MAX_SIZE"
DEFAULT_LIMIT = "10GiB"
DAY = 86400.0  # seconds
STALE = 14 * DAY  # programs of other versions are removed after this time without use
# folders without a manifest are removed after this time; younger ones may be about to get it
ORPHAN = DAY / 24
VERSIONS = ("jengine", "source", "jax", "jaxlib")  # in a program's identity
_FOLDER, _KERNELS = re.compile(r"[0-9a-f]{24}-[0-9]+"), re.compile(r"[0-9a-f]{24}")


def cache_root(root: str | Path | None = None) -> Path:
    """The given folder, or JENGINE_CACHE_DIR, or jengine's folder in the user's cache."""
    return Path(root or os.environ.get(ROOT_VARIABLE) or user_cache_path("jengine"))


def cache_limit(size_limit: int | str | None = None) -> int:
    """Maximum bytes of saved programs: the given limit, or JENGINE_CACHE_MAX_SIZE, or 10 GiB.

    Raises:
        InvalidArgument: the variable is not a size.
    """
    size = parse_bytes("cache_max_size", size_limit) or parse_bytes(
        LIMIT_VARIABLE, os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT
    )
    assert size is not None
    return size


def folder_name(fingerprint: str, num_pages: int) -> str:
    return f"{fingerprint}-{num_pages}"


def saved_page_counts(root: Path, fingerprint: str) -> list[int]:
    """Numbers of pages for which programs of this fingerprint are saved."""
    names = (
        path.name.removeprefix(f"{fingerprint}-") for path in (root / "programs").glob(f"{fingerprint}-*")
    )
    return [int(name) for name in names if name.isdecimal()]


@dataclass(frozen=True, slots=True)
class SavedFolder:
    """Programs of one fingerprint.

    Attributes:
        used: time of the last write or load, in seconds since the epoch.
    """

    path: Path
    bytes: int
    used: float

    def manifest(self) -> Manifest | None:
        """None if it cannot be trusted or read."""
        try:
            return read_manifest(self.path)
        except UntrustedProgram:
            return None


def saved_folders(root: Path) -> list[SavedFolder]:
    """All folders of the cache, of engines with several processes too, the least recently used first."""
    folders = []
    for path in _of_all_processes(root, "programs/*"):
        with contextlib.suppress(OSError):  # removed by another process
            if _FOLDER.fullmatch(path.name) and _is_folder(path):
                size = sum(file.stat().st_size for file in path.iterdir())
                folders.append(SavedFolder(path, size, path.stat().st_mtime))
    return sorted(folders, key=lambda folder: folder.used)


def _of_all_processes(root: Path, pattern: str) -> list[Path]:
    """What matches in the folder of an engine's only process, and in those of engines with several."""
    return [*root.glob(pattern), *root.glob(f"process-*/{pattern}")]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def measured_choices(root: Path) -> list[Path]:
    """Files that record what is fastest on a CPU: dtypes (precision.py), forms of products (kernels.py)."""
    folders = "dtypes", "products"
    return [file for folder in folders for file in _of_all_processes(root, f"{folder}/*.json")]


def kernel_folders(root: Path) -> list[Path]:
    """Folders with the code of a CPU's kernels; see kernel_objects.py."""
    paths = _of_all_processes(root, "kernels/*")
    return [path for path in paths if _KERNELS.fullmatch(path.name) and _is_folder(path)]


def costs_file(root: Path, fingerprint: str) -> Path:
    """File with the step costs of these programs; see CostsFile."""
    return root / "costs" / f"{fingerprint}.json"


def measured_costs(root: Path) -> list[Path]:
    """All files with step costs."""
    return _of_all_processes(root, "costs/*.json")


def quantized_files(root: Path) -> list[Path]:
    """Files with quantized weights, the least recently used first; see engine/setup/model_source.py."""
    return sorted(root.glob("weights/*"), key=lambda file: file.stat().st_mtime)


def remove(folder: Path) -> bool:
    """Deletes a folder of programs, its manifest first. False: a writer uses it, or another user owns it."""
    lock = FolderLock(folder)
    try:
        if not lock.acquire():
            return False
        (folder / MANIFEST).unlink(missing_ok=True)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        return True
    except OSError:
        return False
    finally:
        lock.release()


def trim(root: Path, max_bytes: int, keep: Path) -> None:
    """Removes useless folders, then the least recently used ones until the rest takes at most `max_bytes`.
    keep: the folder in use. Its identity defines the current versions.
    """
    folders = saved_folders(root)
    total = sum(folder.bytes for folder in folders)
    current = next((folder.manifest() for folder in folders if folder.path == keep), None)
    now = time.time()
    for folder in folders:
        if folder.path == keep:
            continue
        if total > max_bytes or (now - folder.used > ORPHAN and _useless(folder, current, now)):
            total -= folder.bytes if remove(folder.path) else 0
    fingerprints = {folder.path.name.partition("-")[0] for folder in saved_folders(root)}
    for file in measured_costs(root):
        with contextlib.suppress(OSError):
            if file.stem not in fingerprints and now - file.stat().st_mtime > STALE:
                file.unlink()


def _useless(folder: SavedFolder, current: Manifest | None, now: float) -> bool:
    """Whether the folder names no programs, or only old programs of other versions."""
    manifest = folder.manifest()
    if manifest is None:
        return True
    other = current is not None and any(
        manifest.identity.get(name) != current.identity.get(name) for name in VERSIONS
    )
    return other and now - folder.used > STALE
