"""Converted checkpoints: invalid ones, and failed conversions."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jengine.base.errors import InvalidArgument, ModelError, OutOfMemory
from jengine.checkpoints import conversion, convert, load, orbax, read_config
from jengine.checkpoints.converted import FORMAT, MARK, PARAMS, stored_config
from jengine.checkpoints.hugging_face import model_config
from jengine.models import Params, build
from jengine.parallel.mesh import make_mesh
from tests.golden.weights import VARIANTS, write_model

KILLED = """
import os, signal, sys
from jengine.checkpoints import conversion, convert, orbax

def assemble(*args, real=conversion.assemble, calls=[]):
    calls.append(args)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)

conversion.assemble, orbax.BATCH = assemble, 1
convert(*sys.argv[1:], progress=False)
"""


def loaded(folder: Path) -> Params:
    return load(folder, build(read_config(folder), "float32", 64), make_mesh(1), progress=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder, "llama_attention_bias")
    return folder


@pytest.fixture(scope="module")
def converted_once(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(str(model), tmp_path_factory.mktemp("converted"), progress=False)


@pytest.fixture
def converted(converted_once: Path, tmp_path: Path) -> Path:
    """A converted checkpoint for tests to damage."""
    shutil.copytree(converted_once, tmp_path / "converted")
    return tmp_path / "converted"


def change_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / MARK).read_text())
    edit(content)
    (folder / MARK).write_text(json.dumps(content))


# The folder to write.


@pytest.mark.parametrize("name", ["file", "full", "full/notes.txt"])
def test_only_a_new_or_an_empty_folder_is_written(name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match=r"out='.*: must be a new or an empty folder"):
        convert(str(model), tmp_path / name, progress=False)
    assert {file.name for file in tmp_path.rglob("*")} == {"file", "full", "notes.txt"}


def test_a_folder_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=r"out='.*: cannot be written: Not a directory"):
        convert(str(model), tmp_path / "file" / "out", progress=False)


def test_an_empty_folder_and_folders_above_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for out in ("empty", "a/b/out"):
        assert convert(str(model), out, progress=False) == Path(out)
        loaded(tmp_path / out)


def test_a_killed_conversion_leaves_nothing_that_loads(model: Path, tmp_path: Path) -> None:
    out, rest = tmp_path / "out", tmp_path / "out.incomplete"
    done = subprocess.run([sys.executable, "-c", KILLED, str(model), str(out)])
    assert done.returncode == -signal.SIGKILL
    assert not out.exists() and any(rest.rglob("_METADATA")), "it was killed in the middle"
    with pytest.raises(ModelError, match=r"out\.incomplete: has Orbax files but no jengine\.json"):
        loaded(rest)
    convert(str(model), out, progress=False)
    loaded(out)
    assert not rest.exists()


def test_a_failed_conversion_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax, "BATCH", 1)

    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_copy_files", refuse)
    with pytest.raises(KeyboardInterrupt):
        convert(str(model), tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"params: cannot be written: .*Not a directory") as caught:
        orbax.save(tmp_path / "file" / PARAMS, [("a", np.zeros(3, np.float32))])
    assert "\n" not in str(caught.value)


def test_one_at_a_time(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out.incomplete").mkdir()
    other = os.open(tmp_path / "out.incomplete", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(InvalidArgument, match=r"out='.*/out': another process is writing it"):
        convert(str(model), tmp_path / "out", progress=False)
    os.close(other)
    convert(str(model), tmp_path / "out", progress=False)


def test_a_folder_of_the_unfinished_ones_name(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out.incomplete").mkdir()
    (tmp_path / "out.incomplete" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match=r"out='.*: is in the way: `jengine convert` did not write it"):
        convert(str(model), tmp_path / "out", progress=False)
    assert (tmp_path / "out.incomplete" / "notes.txt").exists()


# The model to read.


def test_what_cannot_be_converted(model: Path, converted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ModelError, match="converted: is converted already"):
        convert(str(converted), out)
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors"):
        convert(str(broken), out)
    (broken / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ModelError, match="model_type 'mamba' is not supported"):
        convert(str(broken), out)
    assert not out.exists() and not (tmp_path / "out.incomplete").exists()


# The converted folder.


def test_a_folder_without_its_mark(converted: Path) -> None:
    (converted / MARK).unlink()
    (converted / "config.json").unlink()
    with pytest.raises(
        ModelError,
        match=(
            r"converted: has Orbax files but no jengine\.json: `jengine convert` did not write or did not"
            r" finish it"
        ),
    ):
        read_config(converted)


def test_an_orbax_checkpoint_of_someone_elses(tmp_path: Path) -> None:
    from orbax.checkpoint import v1 as ocp

    ocp.save(tmp_path / "theirs", {"layers": [np.zeros(3)]})
    with pytest.raises(ModelError, match=r"theirs: has Orbax files but no jengine\.json"):
        read_config(tmp_path / "theirs")


def test_parameters_of_someone_elses(converted: Path) -> None:
    from orbax.checkpoint import v1 as ocp

    shutil.rmtree(converted / PARAMS)
    ocp.save(converted / PARAMS, {"layers": [np.zeros(3)], "embed": np.zeros((4, 4))})
    with pytest.raises(
        ModelError, match=r"params: tensor embed: has shape \[4, 4\]; the configuration needs \[96, 64\]"
    ):
        loaded(converted)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("num_layers", 3, r"tensor layers\.2\.attention\.o: is missing; convert the model again"),
        ("num_layers", 1, r"tensor layers\.1\.attention\.o: is not part of this model; convert it again"),
        (
            "intermediate_size",
            96,
            r"tensor layers\.0\.mlp\.down: has shape \[64, 112\]; the configuration needs \[64, 96\]",
        ),
    ],
)
def test_parameters_of_another_version(converted: Path, field: str, value: int, match: str) -> None:
    change_config(converted, lambda content: content["model"].update({field: value}))
    with pytest.raises(ModelError, match=f"params: {match}"):
        loaded(converted)


def largest_file(folder: Path) -> Path:
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def test_no_checkpoint_beside_the_mark(converted: Path) -> None:
    shutil.rmtree(converted / PARAMS)
    with pytest.raises(ModelError, match="params: is missing"):
        loaded(converted)


@pytest.mark.parametrize(
    "harm",
    [
        lambda params: largest_file(params).unlink(),
        lambda params: os.truncate(largest_file(params), 5000),
        lambda params: (params / "state" / "manifest.ocdbt").unlink(),
        lambda params: (params / "state" / "manifest.ocdbt").write_bytes(b"nonsense"),
        lambda params: (params / "state" / "_METADATA").write_text("{"),
    ],
    ids=["no data", "less data", "no manifest", "another manifest", "no metadata"],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint(converted: Path, harm: Callable[[Path], object]) -> None:
    harm(converted / PARAMS)
    with pytest.raises(ModelError, match=r"params: is not a complete Orbax checkpoint: .") as caught:
        loaded(converted)
    assert "\n" not in str(caught.value)
    del caught  # and with it the reads that Orbax began beside the one that failed
    gc.collect()


def test_too_little_memory_on_the_device(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(jax, "block_until_ready", refuse)
    with pytest.raises(OutOfMemory, match="the device cannot hold the weights, 322304 bytes as float32"):
        loaded(converted)


# The mark.


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (
            lambda content: content.update(format=1),
            "format=1 is not the one that this version reads, 2; convert the model again",
        ),
        (lambda content: content.clear(), "format=None is not the one"),
        (lambda content: content.update(model=[]), r"model=\[\] must be an object"),
        (
            lambda content: content["model"].update(heads=3),
            "model.heads=3: Unexpected keyword argument: a newer version wrote it",
        ),
        (lambda content: content["model"].pop("hidden_size"), "model.hidden_size: Field required"),
        (
            lambda content: content["model"].update(hidden_size="64"),
            "model.hidden_size='64': Input should be a valid integer",
        ),
        (
            lambda content: content["model"].update(hidden_size=None),
            "model.hidden_size=None: Input should be a valid integer",
        ),
        (
            lambda content: content["model"].update(num_layers=True),
            "model.num_layers=True: Input should be a valid integer",
        ),
        (lambda content: content["model"].update(num_layers=2**31), "model has a whole number of more"),
        (
            lambda content: content["model"].update(norm_eps="small"),
            "model.norm_eps='small': Input should be a valid number",
        ),
        (
            lambda content: content["model"].update(windows=[3, "all"]),
            "model.windows.1='all': Input should be a valid integer",
        ),
        (
            lambda content: content["model"].update(eos_token_ids=1),
            "model.eos_token_ids=1: Input should be a valid array",
        ),
        (
            lambda content: content["model"]["rope"].update(scaling={"kind": "ntk"}),
            "model.rope.scaling.kind='ntk': Input should be 'linear', 'dynamic'",
        ),
        (
            lambda content: content["model"]["rope"].update(
                scaling={"kind": "ntk", "factor": 2, "original_max_position": 8}
            ),
            "model.rope.scaling.kind='ntk': Input should be 'linear', 'dynamic'",
        ),
        (lambda content: content["model"].update(parts=[]), r"parts=\[\] must be an object"),
        (
            lambda content: content["model"].update(parts={"Experts": {}}),
            "parts has an unknown part 'Experts': a newer version wrote it",
        ),
    ],
)
def test_the_configuration_is_read_strictly(
    converted: Path, edit: Callable[[dict[str, Any]], object], match: str
) -> None:
    change_config(converted, edit)
    with pytest.raises(ModelError, match=rf"jengine\.json: {match}"):
        read_config(converted)


def test_an_unreadable_mark(converted: Path) -> None:
    (converted / MARK).write_text("{")
    with pytest.raises(ModelError, match=r"jengine\.json: is not valid JSON"):
        read_config(converted)


def test_fields_that_are_younger_than_the_file(converted: Path) -> None:
    content = json.loads((converted / MARK).read_text())
    before = stored_config(content)
    del content["model"]["norm_offset"]
    content["model"]["rope"]["theta"] = int(content["model"]["rope"]["theta"])
    after = stored_config(content)
    assert after == before and type(after.rope.theta) is float


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_familys_configuration_is_read_as_it_was_written(variant: str) -> None:
    config = model_config(VARIANTS[variant])
    assert stored_config(json.loads(json.dumps({"format": FORMAT, "model": config.plain()}))) == config


def test_parts_are_read_strictly() -> None:
    content = {"format": FORMAT, "model": model_config(VARIANTS["mixtral"]).plain()}
    del content["model"]["parts"]["MixtureOfExperts"]["count"]
    with pytest.raises(ModelError, match=r"MixtureOfExperts\.count: Field required"):
        stored_config(content)
