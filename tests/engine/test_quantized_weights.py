"""Files of weights that a CPU has quantized: read by later starts, and only if they are these weights."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jengine.checkpoints.weights import parts_by_name
from jengine.core.config import EngineConfig
from jengine.engine.setup import model_source
from jengine.engine.setup.model_source import ModelSource
from jengine.engine.setup.shapes import describe
from jengine.execution.cache_folders import quantized_files
from jengine.execution.sources import PACKAGES, source_files
from jengine.models import Params
from jengine.parallel.mesh import make_mesh
from tests.golden.weights import write_model

LIMIT = 1 << 30
pytestmark = pytest.mark.filterwarnings("ignore:quantization='fp8' is emulated")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "SMALLEST", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", "llama_gqa")
    return tmp_path / "model"


def loaded(
    folder: Path, root: Path, quantization: str | None = "w8a8", limit: int = LIMIT, tokens: Any = None
) -> Params:
    options = EngineConfig.of(
        str(folder), {"max_model_len": 64, "quantization": quantization, "dtype": "float32"}
    )
    source = ModelSource.find(options)
    spec = describe(options, source.config, make_mesh(1), folder)
    params = model_source.load_weights(source, spec, tokens, root, limit, progress=False)
    for thread in threading.enumerate():
        if thread.name == "quantized weights":
            thread.join()
    return params


def assert_equal(ours: Params, theirs: Params) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for name, array in parts_by_name(ours).items():
        other = parts_by_name(theirs)[name]
        assert array.dtype == other.dtype and array.sharding == other.sharding
        np.testing.assert_array_equal(np.asarray(array), np.asarray(other))


@pytest.mark.parametrize("quantization", ["w8a8", "int4", "fp8"])
def test_a_later_start_reads_them(
    quantization: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loaded(folder, tmp_path, quantization)
    [file] = quantized_files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(ModelSource, "load", None)
    assert_equal(loaded(folder, tmp_path, quantization), first)


def test_other_weights_have_another_file(folder: Path, tmp_path: Path) -> None:
    """Also if a model's files keep their sizes, or other tokens calibrate the same weights."""
    loaded(folder, tmp_path)
    loaded(folder, tmp_path, "int4")
    os.utime(folder / "model.safetensors", (1, 1))
    loaded(folder, tmp_path)
    assert len(quantized_files(tmp_path)) == 3
    for tokens in (np.ones((1, 8), np.int32), np.zeros((1, 8), np.int32)):
        loaded(folder, tmp_path, "int4", tokens=tokens)
    assert len(quantized_files(tmp_path)) == 5


def test_another_method_has_another_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other code that rounds or calibrates."""
    names = {file.relative_to(PACKAGES).as_posix() for file in source_files()}
    assert {f"pallas_kernels/quantization/{name}.py" for name in ("int4", "gptq", "hadamard")} <= names
    loaded(folder, tmp_path, "int4")
    changed = tmp_path / "packages" / "jengine" / "checkpoints" / "calibration.py"
    changed.parent.mkdir(parents=True)
    changed.write_text("PRIOR = 1")
    monkeypatch.setattr(model_source, "PACKAGES", tmp_path / "packages")
    loaded(folder, tmp_path, "int4")
    changed.write_text("PRIOR = 2")
    loaded(folder, tmp_path, "int4")
    assert len(quantized_files(tmp_path)) == 3


@pytest.mark.parametrize("size", [4, 4000, -10])
def test_a_damaged_file_is_replaced(
    size: int, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = loaded(folder, tmp_path)
    [file] = quantized_files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    with caplog.at_level(logging.WARNING, "jengine"):
        assert_equal(loaded(folder, tmp_path), first)
    assert f"{file} is damaged; weights are quantized again" in caplog.text
    assert file.read_bytes() == whole and quantized_files(tmp_path) == [file]


def test_a_writer_leaves_the_file_of_another_with_its_process_id(folder: Path, tmp_path: Path) -> None:
    """Processes of two containers, or threads."""
    loaded(folder, tmp_path)
    [file] = quantized_files(tmp_path)
    file.unlink()
    other = file.with_suffix(f".{os.getpid()}")
    other.touch()
    loaded(folder, tmp_path)
    assert {*quantized_files(tmp_path)} == {file, other}


def test_a_file_that_others_may_write_is_not_read(folder: Path, tmp_path: Path) -> None:
    first = loaded(folder, tmp_path)
    [file] = quantized_files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-8] + bytes(8))
    file.chmod(0o666)
    assert_equal(loaded(folder, tmp_path), first)
    assert file.read_bytes() == whole and file.stat().st_mode & 0o777 == 0o600


def test_files_together_stay_within_the_limit(folder: Path, tmp_path: Path) -> None:
    loaded(folder, tmp_path)
    [old] = quantized_files(tmp_path)
    left = old.with_suffix(".12345")
    left.touch()
    for file in (old, left):
        os.utime(file, (1, 1))
    size = old.stat().st_size
    loaded(folder, tmp_path, "int8", limit=2 * size)
    assert old in quantized_files(tmp_path) and left not in quantized_files(tmp_path)
    loaded(folder, tmp_path, "fp8", limit=2 * size)
    assert old not in quantized_files(tmp_path) and len(quantized_files(tmp_path)) == 2
    loaded(folder, tmp_path, "int4_mixed", limit=1000)
    assert len(quantized_files(tmp_path)) == 2


def test_a_folder_that_cannot_be_written(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "weights").touch()
    with caplog.at_level(logging.WARNING, "jengine"):
        loaded(folder, tmp_path)
    assert "quantized weights are not written, so the next start quantizes them again" in caplog.text


@pytest.mark.parametrize("quantization", [None, "none"])
def test_what_is_not_quantized_is_not_written(quantization: str | None, folder: Path, tmp_path: Path) -> None:
    loaded(folder, tmp_path, quantization)
    assert not (tmp_path / "weights").exists()
