"""Linux's control groups, which limit containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

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
