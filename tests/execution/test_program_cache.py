"""Filling the program cache: compiled programs are not lost, processes share the work, and its size is
limited.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from jengine.base.errors import InvalidArgument
from jengine.execution import cache_folders, program_cache, program_folder
from jengine.execution import programs as programs_module
from jengine.execution.cache_folders import DAY, cache_limit, saved_folders, trim
from jengine.execution.device_state import ALLOCATE, ALLOCATE_COUNTS
from jengine.execution.kinds import Key
from jengine.execution.program_cache import WAITING
from jengine.execution.program_folder import FolderLock, Manifest, read_manifest, write_manifest
from jengine.execution.programs import Built, Programs, open_cache
from jengine.execution.spec import ExecutionSpec
from tests.execution.specs import make_spec

KEYS: list[Key] = [ALLOCATE, ALLOCATE_COUNTS, "count"]  # the quickest to compile
LIMIT = 1 << 30  # bytes
PATIENCE = 120.0  # seconds, of a busy machine


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_module, "program_keys", lambda spec: KEYS)


def start(root: Path, *, limit: int = LIMIT, wait: bool = True, progress: bool = False) -> Programs:
    spec = make_spec()
    return Programs(spec, open_cache(spec, root, limit, wait=wait), threads=1, progress=progress)


def counts(programs: Programs) -> tuple[int, int]:
    return programs.compiled, programs.loaded


def pausing(after: int, pause: Callable[[], object]) -> Callable[..., Iterator[Built]]:
    """compile_all with a pause before each program except the first ones; earlier ones have been saved."""
    compile_all = programs_module.compile_all

    def compiled(*args: Any, **options: Any) -> Iterator[Built]:
        for number, built in enumerate(compile_all(*args, **options)):
            if number >= after:
                pause()
            yield built

    return compiled


def _start_and_hang(root: Path, one_saved: Event) -> None:
    def hang() -> None:
        one_saved.set()
        time.sleep(10 * PATIENCE)

    programs_module.program_keys = lambda spec: KEYS
    programs_module.compile_all = pausing(1, hang)
    start(root)


def test_programs_are_compiled_beside_their_kernels_and_loaded_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = threading.Event()
    monkeypatch.setattr(programs_module, "prepare", lambda spec: compiled.wait(PATIENCE) or pytest.fail())
    monkeypatch.setattr(programs_module, "compile_all", pausing(1, compiled.set))
    assert counts(start(tmp_path)) == (3, 0)

    order = []
    load = program_cache.ProgramCache.load_one
    monkeypatch.setattr(programs_module, "prepare", lambda spec: order.append("kernels"))
    monkeypatch.setattr(
        program_cache.ProgramCache, "load_one", lambda *given: (order.append("program"), load(*given))[1]
    )
    assert counts(start(tmp_path)) == (0, 3)
    assert order == ["kernels", *["program"] * 3]


def test_a_kernel_that_cannot_be_registered_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: ExecutionSpec) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(programs_module, "prepare", refuse)
    for _ in range(2):  # nothing is saved; then all programs are
        with pytest.raises(RuntimeError, match="no such kernel"):
            start(tmp_path)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_what_an_interrupted_start_compiled_is_kept_and_the_next_goes_on(
    end: signal.Signals, tmp_path: Path
) -> None:
    """The next one is already waiting when the first one ends."""
    context = multiprocessing.get_context("spawn")
    one_saved = context.Event()
    process = context.Process(target=_start_and_hang, args=(tmp_path, one_saved))
    process.start()
    try:
        assert one_saved.wait(PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(start, tmp_path)
            time.sleep(5 * program_cache.POLL)
            assert not second.done()
            assert process.pid is not None
            os.kill(process.pid, end)
            assert counts(second.result(PATIENCE)) == (2, 1)
    finally:
        process.kill()
        process.join()
    assert counts(start(tmp_path)) == (0, 3)


def test_an_interrupt_within_a_library_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(programs_module, "compile_all", pausing(2, interrupt))
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    assert counts(start(tmp_path)) == (1, 2)


def test_starts_at_once_compile_each_program_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first_saved, go_on = threading.Event(), threading.Semaphore(0)

    def pause() -> None:
        first_saved.set()
        assert go_on.acquire(timeout=PATIENCE)

    def said(what: str) -> bool:
        until, text = time.monotonic() + PATIENCE, ""
        while what not in text and time.monotonic() < until:
            time.sleep(program_cache.POLL)
            text += capsys.readouterr().err
        return what in text

    monkeypatch.setattr(programs_module, "compile_all", pausing(1, pause))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # a bar is for somebody who watches
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(start, tmp_path)
        assert first_saved.wait(PATIENCE)
        second = pool.submit(start, tmp_path, progress=True)  # finds one of three
        try:
            assert said(f"{WAITING}:   0%")
            go_on.release()
            assert said(f"{WAITING}:  50%"), "it loads each program as it is saved"
            assert not second.done()
        finally:
            go_on.release(2)
        assert [counts(done.result(PATIENCE)) for done in (first, second)] == [(3, 0), (0, 3)]
        assert second.result().memory == first.result().memory


def test_processes_of_one_engine_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Otherwise, if two engines start at once, each could hold the lock that the other's process needs."""
    spec = make_spec()
    lock = FolderLock(open_cache(spec, tmp_path, LIMIT).folder)
    assert lock.acquire()
    assert counts(start(tmp_path, wait=False)) == (3, 0)
    lock.release()
    assert counts(start(tmp_path)) == (3, 0), "who did not have the lock wrote nothing"


def test_a_lock_file_that_was_removed_guards_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    first, second = FolderLock(folder), FolderLock(folder)
    assert first.acquire() and not second.acquire()
    assert cache_folders.remove(folder) is False and folder.exists()
    first.release()
    assert cache_folders.remove(folder) and not folder.exists()
    assert second.acquire() and not first.acquire()
    second.release()


def test_where_the_file_system_has_no_locks_programs_are_saved_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(program_folder.fcntl, "flock", no_locks)
    assert counts(start(tmp_path)) == (3, 0)
    assert counts(start(tmp_path)) == (0, 3)


def test_what_a_killed_process_left_is_removed_by_the_next_that_compiles(tmp_path: Path) -> None:
    start(tmp_path)
    folder = open_cache(make_spec(), tmp_path, LIMIT).folder
    files = {file.name for file in folder.iterdir()}
    left = [folder / "tmp8x1", folder / f"count-{'0' * 16}.bin"]
    for file in left:
        file.write_bytes(b"half")
    # a start that only loads, deletes nothing
    assert counts(start(tmp_path)) == (0, 3) and all(file.exists() for file in left)
    next(folder.glob("allocate-counts-*")).unlink()
    assert counts(start(tmp_path)) == (1, 2)
    assert {file.name.split("-")[0] for file in folder.iterdir()} == {name.split("-")[0] for name in files}
    assert len([*folder.iterdir()]) == len(files)


def test_a_start_that_compiles_keeps_the_programs_that_it_has_not_loaded_yet(tmp_path: Path) -> None:
    start(tmp_path)
    folder = open_cache(make_spec(), tmp_path, LIMIT).folder
    program_folder.program_file(folder, ALLOCATE, read_manifest(folder).programs[ALLOCATE]).unlink()
    spec = make_spec()
    first = Programs(spec, open_cache(spec, tmp_path, LIMIT), threads=1, progress=False, first=[ALLOCATE])
    assert counts(first) == (1, 0)
    assert read_manifest(folder).notes["coming"] == ["allocate-counts", "count"], "others wait for these"
    assert counts(start(tmp_path)) == (0, 3)
    assert {*read_manifest(folder).notes["memory"]} == {*map(str, KEYS)}


def test_engines_that_share_a_folder_and_differ_keep_each_others_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with a host tier has two programs more. It does not wait for them while another engine saves
    the common ones, and what it compiled later stays.
    """
    spec = make_spec(host_pages=64)
    folder = open_cache(spec, tmp_path, LIMIT).folder

    def others() -> Programs:
        return Programs(
            spec, open_cache(spec, tmp_path, LIMIT), threads=1, progress=False, first=[*KEYS, "spill"]
        )

    saved, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        saved.set()
        assert go_on.wait(PATIENCE)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(programs_module, "compile_all", pausing(1, pause))
        first = pool.submit(start, tmp_path)
        try:
            assert saved.wait(PATIENCE)
            patch.undo()
            cache = open_cache(spec, tmp_path, LIMIT)
            assert not cache.hold() and cache.expects(["count", "spill"]) and not cache.expects(["spill"])
        finally:
            go_on.set()
        assert counts(first.result(PATIENCE)) == (3, 0)
    assert counts(others()) == (1, 3) and counts(start(tmp_path)) == (0, 3)
    assert counts(others()) == (0, 4) and "spill" in read_manifest(folder).programs


def test_a_full_disk_is_a_warning_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, written = os.replace, []

    def full(source: Path, target: Path) -> None:
        written.append(target)
        if len(written) > 3:  # a program, its manifest, and the next program; not its manifest
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.warns(RuntimeWarning, match="could not be saved.*No space left") as warned:
            programs = start(tmp_path)
    assert len(warned) == 1 and counts(programs) == (3, 0) and all(programs[key] for key in KEYS)
    folder = open_cache(make_spec(), tmp_path, LIMIT).folder
    assert sorted(file.suffix for file in folder.iterdir() if file.suffix != ".lock") == [
        "",
        ".bin",
        ".bin",
        ".json",
    ]
    assert counts(start(tmp_path)) == (2, 1)


def test_a_folder_that_nobody_may_write_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "programs").touch()  # no folder, for the superuser as well
    spec = make_spec()
    cache = open_cache(spec, tmp_path, LIMIT)
    with pytest.warns(RuntimeWarning, match="could not be saved") as warned:
        assert cache.hold()
        programs = Programs(spec, cache, threads=1, progress=False)
    assert len(warned) == 1 and counts(programs) == (3, 0)


def saved(root: Path, number: int, *, days: float, size: int = 1000, **identity: object) -> Path:
    """A folder as left by a start, last used this many days ago."""
    folder = root / "programs" / f"{number:024x}-64"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "trunk-8-0-0-0000.bin").write_bytes(b"x" * size)
    write_manifest(folder, Manifest({"source": "now", **identity}, {"trunk-8-0-0": "0000"}, {}))
    used(folder, days)
    return folder


def used(folder: Path, days: float) -> None:
    os.utime(folder, (time.time() - days * DAY,) * 2)


def test_the_least_recently_used_are_removed_above_the_limit(tmp_path: Path) -> None:
    folders = [saved(tmp_path, number, days=days) for number, days in enumerate((3, 1, 2, 4, 0))]
    each = saved_folders(tmp_path)[0].bytes
    trim(tmp_path, 5 * each, keep=folders[4])
    assert all(folder.exists() for folder in folders)
    trim(tmp_path, 3 * each, keep=folders[3])
    assert [folder.exists() for folder in folders] == [False, True, False, True, True]
    trim(tmp_path, 1, keep=folders[4])
    assert [folder.exists() for folder in folders] == [False, False, False, False, True], (
        "what is in use stays, however large"
    )


def test_a_folder_that_is_being_written_is_not_removed(tmp_path: Path) -> None:
    one, other = (saved(tmp_path, number, days=1) for number in (0, 1))
    lock = FolderLock(one)
    assert lock.acquire()
    trim(tmp_path, 1, keep=other)
    lock.release()
    assert one.exists() and read_manifest(one).programs


def test_what_an_update_left_and_what_has_no_manifest_is_removed(tmp_path: Path) -> None:
    now = saved(tmp_path, 0, days=0)
    kept = [
        saved(tmp_path, 1, days=300),
        saved(tmp_path, 2, days=13, source="before"),
        saved(tmp_path, 3, days=0),
    ]
    gone = [saved(tmp_path, 4, days=15, source="before"), saved(tmp_path, 5, days=1)]
    for folder, days in ((kept[2], 0), (gone[1], 1)):
        (folder / "manifest.json").unlink()
        used(folder, days)
    foreign = [tmp_path / "programs" / "mine", tmp_path / "dtypes"]
    for folder in foreign:
        folder.mkdir()
        used(folder, 300)
    trim(tmp_path, LIMIT, keep=now)
    assert all(folder.exists() for folder in (now, *kept, *foreign)) and not any(
        folder.exists() for folder in gone
    )


def test_a_load_counts_as_use_and_a_start_that_compiles_trims(tmp_path: Path) -> None:
    other = saved(tmp_path, 1, days=100)
    start(tmp_path, limit=1)
    assert not other.exists()
    mine = open_cache(make_spec(), tmp_path, LIMIT).folder
    used(mine, 100)
    assert counts(start(tmp_path)) == (0, 3)
    assert time.time() - saved_folders(tmp_path)[0].used < DAY


def test_the_limit_is_an_option_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JENGINE_CACHE_MAX_SIZE", raising=False)
    assert cache_limit() == 10 << 30 and cache_limit("2MiB") == 2 << 20
    monkeypatch.setenv("JENGINE_CACHE_MAX_SIZE", "1GiB")
    assert cache_limit() == 1 << 30 and cache_limit(5) == 5
    monkeypatch.setenv("JENGINE_CACHE_MAX_SIZE", "much")
    with pytest.raises(InvalidArgument, match="JENGINE_CACHE_MAX_SIZE='much': must be a number of bytes"):
        cache_limit()


def test_the_folders_are_known_without_jax() -> None:
    code = "import sys; import jengine.execution.cache_folders; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
