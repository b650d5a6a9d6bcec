"""`jengine cache`: compiled programs that are kept for later starts."""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import time
from pathlib import Path
from typing import Any

from jengine import InvalidArgument
from jengine.base.display import counted
from jengine.commands.flags import add_flags
from jengine.commands.terminal import ago, agreed, note, size_text, table, write
from jengine.execution.cache_folders import (
    DAY,
    SavedFolder,
    cache_limit,
    cache_root,
    kernel_folders,
    measured_choices,
    measured_costs,
    quantized_files,
    remove,
    saved_folders,
)

COLUMNS = "fingerprint", "model", "programs", "size", "device", "jengine", "last used"


def add_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "cache",
        help="show or clear the cache of compiled programs",
        description="Show the cache of compiled programs: its folder, models, devices and sizes.",
    )
    _add_root(parser, default=None)
    parser.set_defaults(run=_show)
    actions = parser.add_subparsers(metavar="ACTION")
    clear = actions.add_parser(
        "clear",
        help="delete them",
        description="Delete compiled programs, measurements and quantized weights. The next start makes them"
        " again.",
    )
    _add_root(clear, default=argparse.SUPPRESS)
    add_flags(clear, ("--older-than", "DAYS", "only what was not used for this number of days"))
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.set_defaults(run=_clear)


def _add_root(parser: argparse.ArgumentParser, default: Any) -> None:
    text = "the cache's folder (default: JENGINE_CACHE_DIR, or jengine's folder in the user's cache)"
    parser.add_argument("--cache-dir", metavar="DIR", type=Path, default=default, help=text)


def _show(options: argparse.Namespace) -> None:
    root = cache_root(options.cache_dir)
    folders = saved_folders(root)[::-1]
    write(f"{root}: {_summary(folders)} of at most {size_text(cache_limit())}\n")
    if weights := quantized_files(root):
        size = size_text(sum(file.stat().st_size for file in weights))
        write(f"{counted(len(weights), 'file')} of quantized weights, {size} of at most as much\n")
    if folders:
        write("\n" + table([COLUMNS, *map(_row, folders)]))


def _clear(options: argparse.Namespace) -> None:
    root, days = cache_root(options.cache_dir), options.older_than
    if days is not None and not days >= 0:
        raise InvalidArgument("older_than", days, "must be a number of days, at least 0")
    before = time.time() - (days or 0.0) * DAY
    folders = [folder for folder in saved_folders(root) if folder.used <= before]
    measured = [
        file
        for file in (*measured_choices(root), *measured_costs(root), *quantized_files(root))
        if file.stat().st_mtime <= before
    ]
    kernels = [folder for folder in kernel_folders(root) if folder.stat().st_mtime <= before]
    if not folders and not measured and not kernels:
        note(f"{root}: nothing to delete")
        return
    if not options.yes and not agreed(f"Delete {_summary(folders)} from {root}?"):
        return
    gone = [folder for folder in folders if remove(folder.path)]
    for file in measured:
        with contextlib.suppress(OSError):
            file.unlink()
    for kernel in kernels:
        shutil.rmtree(kernel, ignore_errors=True)
    note(f"{root}: {_summary(gone)} deleted")
    if len(gone) < len(folders):
        note(f"{counted(len(folders) - len(gone), 'folder')} could not be deleted: in use, or another user's")


def _summary(folders: list[SavedFolder]) -> str:
    """The number of folders and their total size."""
    return (
        f"{counted(len(folders), 'folder')} of programs, {size_text(sum(folder.bytes for folder in folders))}"
    )


def _row(folder: SavedFolder) -> tuple[str, ...]:
    manifest = folder.manifest()
    used = ago(time.time() - folder.used)
    if manifest is None:
        return folder.path.name[:8], "?", "0", size_text(folder.bytes), "?", "?", used
    identity = manifest.identity
    devices = math.prod(identity.get("mesh", {}).values())
    device = f"{devices} x {identity.get('device')}" if devices > 1 else str(identity.get("device"))
    version = str(identity.get("jengine", "?"))
    return (
        folder.path.name[:8],
        _model(identity),
        str(len(manifest.programs)),
        size_text(folder.bytes),
        device,
        version,
        used,
    )


def _model(identity: dict[str, Any]) -> str:
    """Describes a model by its shape: models of the same shape share programs, which have no name."""
    model = identity.get("model", {})
    parts = [
        f"{model.get('family')} {model.get('num_layers')} x {model.get('hidden_size')}",
        str(identity.get("dtype")),
    ]
    return ", ".join([*parts, identity["quantization"]] if identity.get("quantization") else parts)
