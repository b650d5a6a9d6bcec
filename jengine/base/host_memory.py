"""The host's memory that this process may use: the machine's, or less in a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jengine.base.control_groups import ROOT, control_groups, field_of, number_in


class _Names(NamedTuple):
    """A control group's files, and the line of memory.stat that counts pages of files, which the kernel can
    drop.
    """

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
    """Bytes that can be allocated without swapping, on the machine and within each limit; the total if this
    is not known.
    """
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
