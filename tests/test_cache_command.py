"""`jengine cache`: shows and deletes programs."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jengine import cli
from jengine.execution.cache_folders import DAY
from jengine.execution.program_folder import FolderLock, Manifest, write_manifest

MODEL = {"family": "llama", "num_layers": 4, "hidden_size": 256}
IDENTITY: dict[str, Any] = {
    "device": "NVIDIA H200",
    "mesh": {"tensor": 2},
    "jengine": "0.1.0",
    "model": MODEL,
    "dtype": "bfloat16",
}


def saved(root: Path, number: int, *, days: float = 0, **identity: object) -> Path:
    """Programs that were last used this many days ago."""
    folder = root / "programs" / f"{number:08x}{'0' * 16}-64"
    folder.mkdir(parents=True)
    (folder / "trunk-8-0-0-0000.bin").write_bytes(b"x" * 2048)
    write_manifest(folder, Manifest({**IDENTITY, **identity}, {"trunk-8-0-0": "0000"}, {}))
    used(folder, days)
    return folder


def used(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAY,) * 2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JENGINE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JENGINE_CACHE_MAX_SIZE", raising=False)
    return tmp_path


def test_quantized_weights_are_shown_and_deleted(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cache / "weights").mkdir()
    old, new = (cache / "weights" / f"{number}.safetensors" for number in (1, 2))
    for file in (old, new):
        file.write_bytes(b"x" * 1024)
    used(old, 10)
    assert cli.main(["cache"]) == 0
    assert "2 files of quantized weights, 2.0 KiB of at most as much" in capsys.readouterr().out
    assert cli.main(["cache", "clear", "--older-than", "5", "--yes"]) == 0
    assert not old.exists() and new.exists()


def test_it_shows_where_programs_are_and_of_which_models(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(cache, 10, days=3)
    saved(cache / "process-1-of-2", 11, quantization="w8a8", mesh={"tensor": 1})
    (saved(cache, 12, days=1) / "manifest.json").write_text("{")
    used(cache / "programs" / f"0000000c{'0' * 16}-64", 1)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert cli.main(["cache"]) == 0
    head, blank, *lines = capsys.readouterr().out.splitlines()
    assert (
        head.startswith(f"{cache}: 3 folders of programs, ")
        and head.endswith(" KiB of at most 10.0 GiB")
        and not blank
    )
    assert [line.split("  ")[0] for line in lines] == ["fingerprint", "0000000b", "0000000c", "0000000a"]
    assert lines[1].split()[1:] == [
        "llama",
        "4",
        "x",
        "256,",
        "bfloat16,",
        "w8a8",
        "1",
        "2.3",
        "KiB",
        "NVIDIA",
        "H200",
        "0.1.0",
        "now",
    ]
    assert lines[2].split()[1:4] == ["?", "0", "2.0"] and lines[2].endswith("1 day ago")
    assert "2 x NVIDIA H200" in lines[3] and lines[3].endswith("3 days ago")
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before, "looking is no use"


def test_an_empty_cache_is_one_line(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", "--cache-dir", str(tmp_path / "other")]) == 0
    assert (
        capsys.readouterr().out
        == f"{tmp_path / 'other'}: 0 folders of programs, 0 bytes of at most 10.0 GiB\n"
    )
    assert cli.main(["cache", "clear"]) == 0
    assert capsys.readouterr().err == f"{tmp_path}: nothing to delete\n"


def test_clear_deletes_programs_and_measurements_and_nothing_else(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(cache, 1)
    saved(cache / "process-0-of-2", 2)
    for name in ("dtypes", "products", "process-0-of-2/products"):
        (cache / name).mkdir()
        (cache / name / "a.json").write_text("{}")
    kernels = cache / "kernels" / ("0123456789ab" * 2)
    kernels.mkdir(parents=True)
    (kernels / "norm.o").write_bytes(b"code")
    mine = [cache / "kernels" / "mine", cache / "notes.txt", cache / "programs" / "mine"]
    for file in mine:
        file.write_text("the user's")
    assert cli.main(["cache", "clear", "--yes"]) == 0
    assert "2 folders of programs" in capsys.readouterr().err
    assert sorted(path for path in cache.rglob("*") if path.is_file()) == mine


def test_clear_keeps_what_was_used_lately_and_what_is_being_written(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old, busy = saved(cache, 1, days=1), saved(cache, 2, days=9), saved(cache, 3)
    lock = FolderLock(busy)
    assert lock.acquire()
    used(busy, 9)
    assert cli.main(["cache", "clear", "--older-than", "7", "--yes"]) == 0
    lock.release()
    assert (new.exists(), old.exists(), busy.exists()) == (True, False, True)
    assert "1 folder could not be deleted" in capsys.readouterr().err
    assert cli.main(["cache", "clear", "--older-than=-1"]) == 2
    assert "older_than=-1.0: must be a number of days" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "kept"), [("y", False), ("n", True), ("", True)])
def test_it_asks_first(
    answer: str, kept: bool, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(cache, 1)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    assert cli.main(["cache", "clear"]) == 0
    assert f"Delete 1 folder of programs, 2.3 KiB from {cache}? [y/N]" in capsys.readouterr().out
    assert folder.exists() is kept


def test_without_a_terminal_it_deletes_nothing_unasked(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(cache, 1)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert cli.main(["cache", "clear"]) == 2
    assert "error: there is no terminal to ask at: give --yes" in capsys.readouterr().err and folder.exists()
