"""The memory that a process may use, by the files of Linux's control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jengine import InvalidArgument
from jengine.base import host_memory
from jengine.base.host_memory import available_memory, total_memory
from jengine.capacity.planning.memory import fits, local_room
from jengine.core.config import EngineConfig
from jengine.execution.device_state import check_host_memory
from jengine.insight.recording.machine import memory
from jengine.serving.models.pool import MemoryNeed, fits_host
from tests.execution.specs import make_spec

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def write(root: Path, **files: object) -> None:
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


def test_without_linux_it_is_the_machines(tmp_path: Path) -> None:
    assert total_memory(tmp_path) == available_memory(tmp_path) == PHYSICAL
    write(tmp_path, proc__meminfo=f"MemTotal: 9 kB\nMemAvailable:   {5 * 1024} kB\nCached: 1 kB")
    assert (total_memory(tmp_path), available_memory(tmp_path)) == (PHYSICAL, 5 * MIB)


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_of_all_groups_counts(tmp_path: Path, version: int) -> None:
    inside, mount = ("0::/a/b", "") if version == 2 else ("5:cpu:/x\n4:hugetlb,memory:/a/b", "memory/")
    limit, used, files = host_memory.NAMES[version]
    group = tmp_path / f"sys/fs/cgroup/{mount}a"
    write(tmp_path, proc__self__cgroup=inside, proc__meminfo=f"MemAvailable: {900 * 1024} kB")
    none = "max" if version == 2 else 0x7FFFFFFFFFFFF000
    write(group / "b", **{limit: none, used: 70 * MIB})
    assert (total_memory(tmp_path), available_memory(tmp_path)) == (PHYSICAL, 900 * MIB)
    write(group, **{limit: 100 * MIB, used: 80 * MIB})
    assert (total_memory(tmp_path), available_memory(tmp_path)) == (100 * MIB, 20 * MIB)
    write(group, **{"memory.stat": f"anon 5\n{files} {30 * MIB}\nactive_file 7"})
    assert available_memory(tmp_path) == 50 * MIB, "pages of files can be dropped"
    write(group / "b", **{limit: 60 * MIB})
    assert (total_memory(tmp_path), available_memory(tmp_path)) == (60 * MIB, 0)


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="0::/../../docker/1f")
    write(tmp_path / "sys/fs/cgroup", **{"memory.max": 100 * MIB})
    assert total_memory(tmp_path) == 100 * MIB


def test_all_who_ask_get_the_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, proc__self__cgroup="0::/")
    write(tmp_path / "sys/fs/cgroup", **{"memory.max": 40 * MIB, "memory.current": 30 * MIB})
    for function in (total_memory, available_memory):
        monkeypatch.setattr(function, "__defaults__", (tmp_path,))
    with pytest.raises(InvalidArgument, match=r"swap_space=9: must be at most 0.0273 GiB for each device"):
        check_host_memory(9, make_spec(host_pages=1 << 16))
    _, needed, pages = local_room(EngineConfig.of("demo", {}))
    assert needed.limit == 40 * MIB and pages > 0 and not fits(needed, pages)
    assert memory(0.0).available == 10 * MIB
    assert fits_host(MemoryNeed(bytes=10 * MIB), []) and not fits_host(MemoryNeed(bytes=10 * MIB + 1), [])
