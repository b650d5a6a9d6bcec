"""Saved code of kernels: it is loaded only if other users could not have written it."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jengine.execution import kernel_objects
from jengine.execution.cache_folders import STALE, kernel_folders
from jengine.execution.kernel_objects import HASH, KernelObjects, keep_kernels

native = pytest.importorskip("pallas_kernels.llvm.native")
calls = pytest.importorskip("pallas_kernels.llvm.calls")
SEVEN = "define i64 @answer() {\n  ret i64 7\n}\n"


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    before = native._objects
    yield
    native.keep_objects(before)


def answer(text: str) -> int:
    (address,) = native.compiled(lambda: text, "answer", name="kernel")
    return int(ctypes.CFUNCTYPE(ctypes.c_int64)(address)())


def test_a_kept_kernel_is_not_compiled_again(tmp_path: Path) -> None:
    keep_kernels(tmp_path)
    assert answer(SEVEN) == 7
    assert answer("this is not compiled") == 7
    native.keep_objects(None)
    assert answer(SEVEN.replace("7", "8")) == 8, "without a place to keep it, it is compiled"
    [folder] = kernel_folders(tmp_path)
    assert [file.name.partition("-")[0] for file in folder.iterdir()] == ["kernel"]
    assert folder.stat().st_mode & 0o077 == 0 and next(folder.iterdir()).stat().st_mode & 0o077 == 0


def test_what_calls_a_kept_kernel_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with as many functions share it, since it holds no addresses."""
    keep_kernels(tmp_path)
    registered: list[str] = []
    monkeypatch.setattr(calls, "_registered", set())
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **__: registered.append(name))
    for name in "first", "second":
        calls.register(name, lambda: native.compiled(lambda: SEVEN, "answer", name="kernel"))
        monkeypatch.delattr(native, "_optimized", raising=False)  # nothing else can be compiled
    assert registered == ["first", "second"]
    with pytest.raises(NameError):
        calls.register("third", lambda: [(1, 2), (1, 2)])


def test_what_is_not_trusted_is_compiled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep_kernels(tmp_path)
    assert answer(SEVEN) == 7
    [folder] = kernel_folders(tmp_path)
    [file], eight = [*folder.iterdir()], SEVEN.replace("7", "8")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with caplog.at_level(logging.WARNING, "jengine"):
        assert answer(eight) == 8
    assert "is damaged" in caplog.text
    file.chmod(0o666)
    assert answer(SEVEN) == 7
    folder.chmod(0o777)
    (folder / "planted.o").write_bytes(b"x" * 99)
    assert answer(eight) == 8
    assert [file.name.partition("-")[0] for file in folder.iterdir()] == ["kernel"], (
        "what others may have written is gone"
    )
    assert answer(SEVEN) == 8, "and now it is kept"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("in the way")
    keep_kernels(tmp_path)
    assert answer(SEVEN) == 7


def test_every_source_has_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_kernels(tmp_path)
    assert answer(SEVEN) == 7
    [old] = kernel_folders(tmp_path)
    monkeypatch.setattr(kernel_objects, "source_digest", lambda: "another source")
    keep_kernels(tmp_path)
    assert answer(SEVEN.replace("7", "8")) == 8
    assert len(kernel_folders(tmp_path)) == 2
    os.utime(old, (time.time() - 2 * STALE,) * 2)
    keep_kernels(tmp_path)
    assert len(kernel_folders(tmp_path)) == 1, "that of an old version is removed"


def test_files_begin_with_their_hash(tmp_path: Path) -> None:
    objects = KernelObjects(tmp_path / "kernels")
    assert objects.load("kernel") is None
    objects.save("kernel", b"code")
    assert (
        objects.load("kernel") == b"code"
        and len((tmp_path / "kernels" / "kernel.o").read_bytes()) == HASH + 4
    )
