"""Folders that `jengine convert` wrote with quantized parameters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jengine.base.errors import InvalidArgument, ModelError
from jengine.checkpoints import convert, load, read_config
from jengine.checkpoints.orbax import by_name
from jengine.core.config import EngineConfig
from jengine.core.quantization import Quantization
from jengine.engine.setup.shapes import describe
from jengine.models import Model, Params, build
from jengine.models.config import Converted, ModelConfig, StoredWeights
from jengine.parallel.mesh import make_mesh
from jengine.serving.processes.engines import model_engine
from pallas_kernels.products.weights import is_weight
from pallas_kernels.quantization.int4 import Int4
from pallas_kernels.quantization.quantized import Quantized
from tests.batch_mocks import make_tokenizer
from tests.engine.running import SMALL
from tests.golden.weights import write_model

VARIANT = "llama_tied"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", VARIANT)
    return tmp_path / "model"


def declared(config: ModelConfig, **options: object) -> Model:
    return build(config, config.dtype, config.max_position, **options)  # type: ignore[arg-type]


def restored(folder: Path) -> Params:
    return load(folder, declared(read_config(folder)), make_mesh(1), progress=False)


def same(ours: Params, theirs: Params) -> None:
    """Bit for bit, and in the same forms."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == other.dtype and np.asarray(mine).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("int4", 32),
        *(
            pytest.param(kind, group, marks=pytest.mark.full)
            for kind, group in (("int4", 128), ("int8", 32), ("w8a8", 32), ("w4a8", 128), ("fp8", 32))
        ),
    ],
)
def test_parameters_are_as_quantized_on_load(kind: str, group: int, folder: Path, tmp_path: Path) -> None:
    out = convert(
        str(folder), tmp_path / "out", quantization=kind, quantization_group_size=group, progress=False
    )  # type: ignore[arg-type]
    same(
        restored(out),
        load(
            folder,
            declared(read_config(folder), quantization=kind, group_size=group),
            make_mesh(1),
            progress=False,
        ),
    )


@pytest.mark.parametrize(
    ("variant", "eight"), [("llama_tied", {"embed", "qkv", "down"}), ("gpt2", {"embed", "qkv", "down"})]
)
def test_mixed_keeps_what_loses_most_in_eight_bits(variant: str, eight: set[str], tmp_path: Path) -> None:
    write_model(tmp_path, variant)
    model = declared(read_config(tmp_path), quantization="int4_mixed", group_size=64)
    forms = {name.rpartition(".")[2]: leaf for name, leaf in by_name(model.params).items() if is_weight(leaf)}
    assert {name for name, leaf in forms.items() if isinstance(leaf, Quantized)} == eight and not forms[
        "qkv"
    ].inputs
    assert all(leaf.group == 64 for leaf in forms.values() if isinstance(leaf, Int4))


def test_the_format_that_holds_is_reported(folder: Path, tmp_path: Path) -> None:
    """That of the option, of a converted folder or of a quantized checkpoint."""
    plain = read_config(folder)
    out = convert(str(folder), tmp_path / "out", quantization="int8", progress=False)
    quantized = dataclasses.replace(plain, stored=StoredWeights(form="float8_e4m3fn"))
    assert declared(plain).quantized == declared(plain, quantization="none").quantized == ""
    assert declared(plain, quantization="w8a8").quantized == "w8a8"
    assert declared(read_config(out)).quantized == "int8"
    assert (
        declared(quantized).quantized == "float8_e4m3fn"
        and declared(quantized, quantization="int8").quantized == "int8"
    )


@pytest.mark.full
def test_a_server_reports_a_converted_folder_s_format(folder: Path, tmp_path: Path) -> None:
    out = convert(str(folder), tmp_path / "out", quantization="int8", progress=False)
    (tmp_path / "tokenizer").mkdir()
    made = model_engine(
        model=str(out),
        tokenizer=str(make_tokenizer(tmp_path / "tokenizer")),
        cache_dir=str(tmp_path),
        **SMALL,
    )
    assert made.info.quantization == "int8"


def test_options_that_a_converted_folder_rejects(folder: Path, tmp_path: Path) -> None:
    out = convert(str(folder), tmp_path / "out", quantization="int8", progress=False)
    config = read_config(out)
    assert declared(config, quantization="int8").params == declared(config).params
    with pytest.raises(
        InvalidArgument, match=r"quantization='w8a8': must be None or int8, as the folder was converted with"
    ):
        declared(config, quantization="w8a8")
    with pytest.raises(
        InvalidArgument,
        match=r"tensor_parallel_size=2: must be 1 with a folder that was converted with quantization",
    ):
        declared(config, shards=2)
    options = {"quantization": "int4", "calibration_data": "text"}
    with pytest.raises(
        InvalidArgument, match=r"calibration_data='text': the folder was converted with quantization"
    ):
        describe(EngineConfig.of(str(out), options), config, make_mesh(1), Path())


def test_options_that_convert_rejects(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"calibration_data='text': needs quantization=int4, int4_mixed or w4a8"
    ):
        convert(str(folder), tmp_path / "out", quantization="int8", calibration_data="text")
    with pytest.raises(
        InvalidArgument, match=r"quantization_group_size=64: needs quantization=int4, int4_mixed or w4a8"
    ):
        convert(str(folder), tmp_path / "out", quantization_group_size=64)
    with pytest.raises(InvalidArgument, match=r"quantization_group_size=16: must be 32, 64 or 128"):
        EngineConfig.of(str(folder), {"quantization": "int4", "quantization_group_size": 16})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_what_an_earlier_version_stored_otherwise_is_refused(
    kind: Quantization, folder: Path, tmp_path: Path
) -> None:
    """Embeddings of its fp8 are e4m3, and would be read as int8; its groups of four bits have offsets."""
    out = convert(str(folder), tmp_path / "out", quantization=kind, progress=False)
    assert read_config(out).converted == Converted(quantization=kind, revision=2)
    mark = json.loads((out / "jengine.json").read_text())
    del mark["model"]["converted"]["revision"]
    (out / "jengine.json").write_text(json.dumps(mark))
    with pytest.raises(
        ModelError,
        match=rf"jengine\.json: was converted with {kind} by another version.*convert the model again",
    ):
        read_config(out)
    mark["model"]["converted"]["quantization"] = "w8a8"  # has not changed
    (out / "jengine.json").write_text(json.dumps(mark))
    assert read_config(out).converted == Converted(quantization="w8a8")
