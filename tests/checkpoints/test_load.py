"""Loading checkpoints onto the device, and errors in checkpoints."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file

from jengine.base.errors import ModelError
from jengine.checkpoints import load, read_config
from jengine.checkpoints.in_memory import in_memory
from jengine.checkpoints.weights import read
from jengine.models import Model, Params, build
from jengine.models.pieces import Piece
from jengine.parallel.mesh import make_mesh
from tests.golden.heads import write_mtp
from tests.golden.weights import weights, write_model

VARIANT = "llama_attention_bias"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, VARIANT)
    return tmp_path


def declared(folder: Path, dtype: str = "float32") -> Model:
    return build(read_config(folder), dtype, 64)


def loaded(folder: Path, dtype: str = "float32") -> Params:
    return load(folder, declared(folder, dtype), make_mesh(1), progress=False)


def shard(folder: Path) -> None:
    """Splits model.safetensors into two files, separating the parts of fused parameters."""
    tensors = weights(VARIANT)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    places = {tensor: names[i % 2] for i, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file(
            {tensor: tensors[tensor] for tensor, place in places.items() if place == name}, folder / name
        )
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "model.safetensors").unlink()


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = weights(VARIANT)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def rewrite_header(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_values_are_fused_and_placed(folder: Path) -> None:
    tensors, params = weights(VARIANT), loaded(folder)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), declared(folder).params
    )
    assert params["embed"].sharding.spec == PartitionSpec("tensor", None)
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"])
    # by kv head
    q, k, v = (tensors[f"model.layers.1.self_attn.{p}_proj.weight"].reshape(2, -1, 64) for p in "qkv")
    np.testing.assert_array_equal(params["layers"][1]["attention"]["qkv"], np.concatenate([q, k, v], axis=1))
    gate_up = np.stack([tensors[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up")], axis=1)
    np.testing.assert_array_equal(params["layers"][0]["mlp"]["gate_up"], gate_up)


def test_sharded_files_give_the_same(folder: Path) -> None:
    whole = loaded(folder)
    shard(folder)
    jax.tree.map(np.testing.assert_array_equal, loaded(folder), whole)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_dtypes_are_converted(folder: Path, stored: str, wanted: str) -> None:
    kind = {"F16": "float16", "BF16": "bfloat16", "F64": "float64"}
    tensors = {name: array.astype(stored) for name, array in weights(VARIANT).items()}
    header, body = {}, b""
    for name, array in tensors.items():  # the safetensors package's numpy side writes no bfloat16
        code = next(code for code, dtype in kind.items() if dtype == stored)
        header[name] = {
            "dtype": code,
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + array.nbytes],
        }
        body += array.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    found = loaded(folder, wanted)["lm_head"]
    assert found.dtype == wanted
    expected = tensors["lm_head.weight"].astype(ml_dtypes.bfloat16 if wanted == "bfloat16" else wanted)
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_weights_do_not_hang_on_the_file(folder: Path) -> None:
    params = loaded(folder)
    before = jax.tree.map(np.array, params)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_host_memory_peaks_at_the_largest_parameter(tmp_path: Path) -> None:
    hidden, ffn, layers = 128, 4096, 6
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2}))
    model = declared(tmp_path, "bfloat16")  # from float32, so that every parameter passes through host memory
    pieces = jax.tree.leaves(model.sources, is_leaf=lambda node: isinstance(node, Piece))
    save_file(
        {piece.name: np.zeros(piece.shape, np.float32) for piece in pieces}, tmp_path / "model.safetensors"
    )
    largest = 2 * ffn * hidden * 2  # gate-up, in bytes
    tracemalloc.start()
    params = load(tmp_path, model, make_mesh(1), progress=False)
    # a CPU device may have taken the host's memory over: that is held
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert total > 8 * largest  # or the bounds below would say nothing
    assert held < total + largest / 8
    assert peak - held < 1.25 * largest


def test_progress_is_shown_when_asked(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load(folder, declared(folder), make_mesh(1), progress=False)
    assert capfd.readouterr().err == ""
    load(folder, declared(folder), make_mesh(1))
    assert "weights" in capfd.readouterr().err


def test_known_extras_are_accepted(tmp_path: Path) -> None:
    write_model(tmp_path, "llama_tied")
    tensors = weights("llama_tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lm_head" not in loaded(tmp_path)


@pytest.mark.parametrize(
    ("variant", "prefix"), [("gpt2", "transformer."), ("opt_350m", "model."), ("llama_mha", "model.")]
)
def test_checkpoints_of_the_bare_decoder(tmp_path: Path, variant: str, prefix: str) -> None:
    """GPT-2 and OPT on the hub have no prefix, and GPT-2 includes its causal masks, in a dtype not used for
    weights.
    """
    write_model(tmp_path, variant)
    whole = loaded(tmp_path)
    tensors = {name.removeprefix(prefix): array for name, array in weights(variant).items()}
    if variant == "gpt2":
        tensors["h.0.attn.bias"], tensors["h.1.attn.masked_bias"] = (
            np.ones((1, 1, 256, 256), np.uint8),
            np.zeros((), np.float32),
        )
    save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path), whole)


def test_transposed_and_stacked_tensors(tmp_path: Path) -> None:
    write_model(tmp_path, "gpt2")
    tensors, layer = weights("gpt2"), loaded(tmp_path)["layers"][1]
    q, k, v = (
        part.T.reshape(4, 16, 64)
        for part in np.split(tensors["transformer.h.1.attn.c_attn.weight"], 3, axis=1)
    )
    np.testing.assert_array_equal(layer["attention"]["qkv"], np.concatenate([q, k, v], axis=1))
    np.testing.assert_array_equal(layer["mlp"]["up"], tensors["transformer.h.1.mlp.c_fc.weight"].T)


def fails(folder: Path, *, file: str, match: str, tensor: str | None = None) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        loaded(folder)
    assert caught.value.file == folder / file
    assert caught.value.tensor == tensor
    assert "\n" not in str(caught.value)


def test_missing_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(Q_PROJ))
    fails(folder, file="", tensor=Q_PROJ, match=f"tensor {Q_PROJ}: is missing")


def test_unknown_tensor(folder: Path) -> None:
    change(
        folder,
        lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}),
    )
    fails(
        folder,
        file="model.safetensors",
        tensor="model.layers.2.mlp.up_proj.weight",
        match="is not part of this model",
    )


def test_output_head_of_an_untied_model_is_no_extra(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    fails(folder, file="", tensor="lm_head.weight", match="is missing")


def test_wrong_shape(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ][:-1]}))
    fails(
        folder,
        file="model.safetensors",
        tensor=Q_PROJ,
        match=r"has shape \[63, 64\]; the configuration needs \[64, 64\]",
    )


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fails(
        folder,
        file="",
        match="has neither model.safetensors nor pytorch_model.bin, nor an index of such files",
    )


def test_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    fails(folder, file="model-00002-of-00002.safetensors", match="is missing")


def test_index_places_a_tensor_where_it_is_not(folder: Path) -> None:
    shard(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["absent"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    fails(folder, file="model-00001-of-00002.safetensors", tensor="absent", match="is missing, but")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_index_without_a_map(folder: Path, content: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(content)
    fails(folder, file=INDEX, match="weight_map is missing or does not map")


def test_truncated_body(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(
        ModelError, match=r"model\.safetensors: tensor .*: is truncated: the tensors reach to byte"
    ):
        loaded(folder)


def test_truncated_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    fails(
        folder, file="model.safetensors", match=r"is truncated: the header needs \d+ bytes, the file has 100"
    )


@pytest.mark.parametrize("content", [b"short", b"\xff" * 64])
def test_no_safetensors_file(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    fails(folder, file="model.safetensors", match="the header is corrupt: this is not a safetensors file")


def test_empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    fails(folder, file="model.safetensors", match="cannot be mapped into memory")


@pytest.mark.parametrize("header", [b"{not json", b"[1, 2]", b"\xff\xfe"])
def test_header_is_no_object(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    fails(folder, file="model.safetensors", match="the header is corrupt: it is not")


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda entry: entry.pop("dtype"), "it lacks dtype, shape or data_offsets"),
        (lambda entry: entry.update(shape="wide"), "it lacks dtype, shape or data_offsets"),
        (lambda entry: entry.update(dtype="C64"), "dtype C64 is not supported; F64, F32, F16, BF16 are"),
        (lambda entry: entry.update(dtype="I32"), "dtype I32 is not supported; F64, F32, F16, BF16 are"),
        (
            lambda entry: entry["data_offsets"].__setitem__(1, entry["data_offsets"][1] + 4),
            r"F32\[64, 64\] does not fill bytes",
        ),
        (lambda entry: entry.update(shape=[-64, -64]), "they have the wrong type or value"),
        (lambda entry: entry.update(shape=[2**70]), "they have the wrong type or value"),
        (lambda entry: entry.update(shape=[1] * 100), "has 100 dimensions; at most 8"),
        (lambda entry: entry.update(dtype=["F32"]), r"dtype \['F32'\] is not supported"),
    ],
)
def test_header_entry_is_wrong(folder: Path, edit: Callable[[dict[str, Any]], object], match: str) -> None:
    rewrite_header(folder, lambda header: edit(header[Q_PROJ]))
    fails(folder, file="model.safetensors", tensor=Q_PROJ, match=match)


@pytest.mark.parametrize(("variant", "other_parts"), [("gemma3_images", 39), ("mistral3", 2)])
def test_text_models_leave_other_parts_and_say_so(
    variant: str, other_parts: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "all", variant)
    with caplog.at_level("WARNING", "jengine"):
        params = loaded(tmp_path / "all")
    assert [record.getMessage() for record in caplog.records] == [
        f"{other_parts} tensors of vision_tower, multi_modal_projector are not loaded with the model:"
        " only text is supported"
    ]
    text = read_config(tmp_path / "all")
    layer = next(
        array
        for name, array in weights(variant).items()
        if name.endswith("model.layers.1.mlp.down_proj.weight")
    )
    np.testing.assert_array_equal(params["layers"][1]["mlp"]["down"], layer)
    assert params["embed"].shape == (text.vocab_size, text.hidden_size)


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "gemma3_images")
    save_file(
        {**weights("gemma3_images"), "audio_tower.weight": np.ones(1, np.float32)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ModelError, match=r"audio_tower\.weight.*is not part of this model"):
        loaded(tmp_path)


def test_experts_one_by_one_or_stacked(tmp_path: Path) -> None:
    """Qwen3.5's own checkpoints stack the experts of a layer; those of its text model that transformers saves
    do not.
    """
    write_model(tmp_path, "qwen3_5_moe_text")
    stacked, apart = loaded(tmp_path), {}
    for name, array in weights("qwen3_5_moe_text").items():
        module, _, part = name.rpartition(".")
        if not module.endswith(".experts"):
            apart[name] = array
            continue
        for expert, matrix in enumerate(array):
            halves = (
                {"gate_proj": matrix[:40], "up_proj": matrix[40:]}
                if part == "gate_up_proj"
                else {"down_proj": matrix}
            )
            apart |= {
                f"{module}.{expert}.{half}.weight": np.ascontiguousarray(rows)
                for half, rows in halves.items()
            }
    assert "model.layers.3.mlp.experts.5.up_proj.weight" in apart
    save_file(apart, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path), stacked)


def test_stacked_experts_of_another_shape(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3_5_moe_text")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = weights("qwen3_5_moe_text")
    save_file({**tensors, name: tensors[name][:-1]}, tmp_path / "model.safetensors")
    fails(tmp_path, file="", tensor="model.layers.0.mlp.experts.5.down_proj.weight", match="is missing")
    save_file({**tensors, name: tensors[name][..., :-1]}, tmp_path / "model.safetensors")
    match = r"has shape \[64, 39\]; the configuration needs \[64, 40\]"
    fails(
        tmp_path,
        file="model.safetensors",
        tensor="model.layers.0.mlp.experts.0.down_proj.weight",
        match=match,
    )


def test_layers_that_are_not_there(tmp_path: Path) -> None:
    write_model(tmp_path, "llama_gqa", num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1000}))
    with pytest.raises(ModelError, match="num_hidden_layers=1000, but there are tensors of only 2 layers"):
        read_config(tmp_path)


def test_an_index_names_no_files_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    index = {"weight_map": {Q_PROJ: "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(folder, file="model.safetensors.index.json", match="weight_map names '../other.safetensors'")


def test_tensors_of_a_head_that_is_loaded_are_not_said_to_be_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_mtp(tmp_path, "mimo")
    model = build(read_config(tmp_path), "float32", 64)
    with caplog.at_level("WARNING", "jengine"):
        read(tmp_path, model, drafts=True)
        assert not caplog.records
        read(tmp_path, model)
    assert "method mtp of speculative_config uses them" in caplog.text


def test_experts_in_both_layouts(tmp_path: Path) -> None:
    """Qwen3-VL's are published as [experts, in, out], and saved by transformers as [experts, out, in]. Where
    both shapes fit, it takes them for the latter.
    """

    def params_of(tensors: dict[str, Any]) -> Any:
        return load(tmp_path, model, make_mesh(1), False, in_memory(tensors))["layers"][0]["mlp"]

    def turned(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: a.swapaxes(1, 2) if ".experts." in name else a for name, a in tensors.items()}

    variant = "qwen3_vl_moe"
    write_model(tmp_path, variant)
    model, published = build(read_config(tmp_path), "float32", 64), weights(variant)
    jax.tree.map(np.testing.assert_array_equal, params_of(turned(published)), params_of(published))
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = config["text_config"]["hidden_size"] // 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, square = build(read_config(tmp_path), "float32", 64), weights(variant, config)
    stored = square["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(params_of(square)["gate_up"][:, :, 0], stored[:, : stored.shape[1] // 2])
