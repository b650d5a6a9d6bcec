"""The host's memory that this process may use: the machine's, or what its control groups leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


def control_groups(controller: str, root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """Folders of the groups with this process in which this controller, such as memory, has its files, and
    their version, 1 or 2; the innermost last.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, inside = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            mount /= controller
        # in a container the mount may begin at its own group, and have no folder of that name
        steps = [step for step in inside.split("/") if step not in ("", "..")]
        for count in range(len(steps) + 1):
            yield mount.joinpath(*steps[:count]), 1 if controllers else 2


def number_in(file: Path) -> int | None:
    """None if there is no such file, or it says "max"."""
    text = text_of(file).strip()
    return int(text) if text.isdigit() else None


def field_of(file: Path, name: str) -> int | None:
    """The number after a name at the beginning of a line; None if there is none."""
    _, separator, rest = f"\n{text_of(file)}".partition(f"\n{name} ")
    return int(rest.split(maxsplit=1)[0]) if separator else None


def text_of(file: Path | str) -> str:
    """A file of the kernel's, of at most 64 KiB; empty if there is none. Takes some microseconds."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 1 << 16).decode()
    except OSError:  # a process that has just ended
        return ""
    finally:
        os.close(descriptor)


class _Names(NamedTuple):
    """A control group's files, and the line of memory.stat that counts droppable pages of files."""

    limit: str
    used: str
    files: str


NAMES = {
    1: _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Names("memory.max", "memory.current", "inactive_file"),
}


def total_memory(root: Path = ROOT) -> int:
    """Bytes of the machine's memory, or of the smallest limit of this process's control groups."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *[limit for limit, _, _ in _limits(root)]])


def available_memory(root: Path = ROOT) -> int:
    """Bytes that can be allocated without swapping, within each limit; the total if not known."""
    bounds = [total_memory(root)]
    if (available := field_of(root / "proc/meminfo", "MemAvailable:")) is not None:
        bounds.append(1024 * available)
    for limit, group, names in _limits(root):
        if (used := number_in(group / names.used)) is not None:
            bounds.append(limit - used + (field_of(group / "memory.stat", names.files) or 0))
    return max(min(bounds), 0)


def _limits(root: Path) -> Iterator[tuple[int, Path, _Names]]:
    """The limits that apply, each with its group's folder."""
    for group, version in control_groups("memory", root):
        if (limit := number_in(group / NAMES[version].limit)) is not None:
            yield limit, group, NAMES[version]
