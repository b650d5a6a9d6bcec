"""PyTorch's .bin files: written by PyTorch 2.13 (tests/golden/record_pickled.py), and invalid ones."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jengine.base.errors import ModelError
from jengine.checkpoints import load, pickled, read_config
from jengine.checkpoints.files import found_tensors
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from tests.checkpoints.pickled_models import archive, dictionary, rebuilt
from tests.golden.weights import weights, write_model

DATA = Path(__file__).parent.parent / "data" / "pytorch"


def test_tensors_are_pytorchs() -> None:
    got, want = (
        pickled.read_file(DATA / "pytorch_model.bin", ("ids",)),
        load_file(DATA / "expected.safetensors"),
    )
    assert list(got) == [
        "float32",
        "float16",
        "bfloat16",
        "float64",
        "transposed",
        "part",
        "tied",
        "parameter",
        "number",
        "empty",
    ]
    for name, tensor in got.items():
        assert tensor.file == DATA / "pytorch_model.bin" and tensor.array.dtype == want[name].dtype
        np.testing.assert_array_equal(tensor.array, want[name])


def test_a_folder_with_an_index(tmp_path: Path) -> None:
    shutil.copy(DATA / "pytorch_model.bin", tmp_path / "pytorch_model-00001-of-00001.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"float32": "pytorch_model-00001-of-00001.bin"}}'
    )
    np.testing.assert_array_equal(
        found_tensors(tmp_path, None)["float32"].array, load_file(DATA / "expected.safetensors")["float32"]
    )


class Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("function", [os.system, eval, getattr, io.open, np.array])
def test_nothing_that_a_pickle_names_is_called(tmp_path: Path, function: Any) -> None:
    ran = tmp_path / "ran"
    argument = f"open({str(ran)!r}, 'w')" if function is eval else f"touch {ran}"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ModelError, match=r"names \S+\.\S+; only tensors are read"):
            pickled.read_file(
                archive(
                    tmp_path / "pytorch_model.bin", pickle.dumps({"a": Runs(function, argument)}, protocol)
                ),
                (),
            )
    assert not ran.exists()


def tensor(**how: Any) -> bytes:
    """A pickle with one tensor, named a."""
    return dictionary(a=rebuilt(**how))


def test_a_model_without_safetensors(tmp_path: Path) -> None:
    """Like OPT's checkpoints: a .bin file, with the names of the decoder alone."""
    write_model(tmp_path / "a", "opt_125m")
    write_model(tmp_path / "b", "opt_125m")
    (tmp_path / "b" / "model.safetensors").unlink()
    arrays = {
        name.removeprefix("model."): np.ascontiguousarray(array)
        for name, array in weights("opt_125m").items()
        if name != "lm_head.weight"
    }
    shapes = {
        name: (array.size, array.shape, [stride // 4 for stride in array.strides])
        for name, array in arrays.items()
    }
    pickle_ = dictionary(**{name: rebuilt(name, count, 0, *laid) for name, (count, *laid) in shapes.items()})
    archive(
        tmp_path / "b" / "pytorch_model.bin",
        pickle_,
        **{f"data/{name}": array.tobytes() for name, array in arrays.items()},
    )
    one, other = (
        load(folder, build(read_config(folder), "float32", 64), make_mesh(1), progress=False)
        for folder in (tmp_path / "a", tmp_path / "b")
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_pickle_written_by_hand(tmp_path: Path) -> None:
    numbers = np.arange(4, dtype=np.float32)
    file = archive(
        tmp_path / "pytorch_model.bin",
        tensor(offset=1, shape=(2, 2), strides=(1, 1)),
        **{"data/0": numbers.tobytes()},
    )
    assert pickled.read_file(file, ())["a"].array.tolist() == [[1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (tensor(key="1"), "has no storage 1"),
        (tensor(count=5), "storage 0 needs 20 bytes"),
        (tensor(count=-1), "is truncated"),
        (tensor(offset=1), "reaches to element 4 of a storage of 4"),
        (tensor(shape=(2,), strides=(-1,)), r"strides \[-1\]"),
        (tensor(shape=(2, 2)), r"shape \[2, 2\] has strides \[1\]"),
        (tensor(shape=(2**40, 2**40), strides=(0, 1)), "reaches to element"),
        (pickle.dumps([1], 2), "holds a list, not a dictionary"),
        (pickle.dumps({"a": 1}, 2), "holds a int under 'a', not a tensor"),
        (pickle.dumps({1: 1}, 2), "under 1, not a tensor"),
        (b"\x80\x02}q", "data.pkl is corrupt"),
        (b"", "data.pkl is corrupt"),
    ],
)
def test_corrupt_files(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        pickled.read_file(archive(tmp_path / "pytorch_model.bin", content, **{"data/0": bytes(16)}), ())


def test_files_of_other_kinds(tmp_path: Path) -> None:
    for file in DATA / "before_1_6.bin", DATA / "expected.safetensors":
        with pytest.raises(ModelError, match="is not a zip archive by PyTorch"):
            pickled.read_file(file, ())
    with pytest.raises(ModelError, match="is missing"):
        pickled.read_file(tmp_path / "pytorch_model.bin", ())
    with pytest.raises(ModelError, match="byteorder b'big' is not supported"):
        pickled.read_file(archive(tmp_path / "pytorch_model.bin", tensor(), byteorder=b"big"), ())
    compressed = tmp_path / "compressed.bin"
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", tensor())
        made.writestr("archive/data/0", bytes(16))
    with pytest.raises(ModelError, match="storage 0 is compressed"):
        pickled.read_file(compressed, ())


def test_a_truncated_file(tmp_path: Path) -> None:
    whole = (DATA / "pytorch_model.bin").read_bytes()
    for length in range(0, len(whole), 97):
        (tmp_path / "pytorch_model.bin").write_bytes(whole[:length])
        with pytest.raises(ModelError):
            pickled.read_file(tmp_path / "pytorch_model.bin", ())
