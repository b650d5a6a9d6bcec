"""Models in GGUF files: logits, four bits in memory, configurations, and rejected files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from jengine.base.compiles import compile_count
from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.gguf_file import KINDS, GgufFile, dequantized, open_gguf
from jengine.checkpoints import convert, has_output_head, load, read_config, resolve
from jengine.checkpoints.gguf import ARCHITECTURES, FOUR_BITS, NAMES, _four_bits, _name
from jengine.checkpoints.hugging_face import model_config
from jengine.hub.files import TOKENIZER_FILES, WITHOUT_WEIGHTS
from jengine.models import Params, build
from jengine.models.rope import rope
from jengine.parallel.mesh import make_mesh
from pallas_kernels.products.weights import is_weight
from pallas_kernels.quantization.int4 import Int4
from pallas_kernels.quantization.quantized import Quantized, dequantize
from tests.checkpoints.gguf_models import write_gguf
from tests.golden.weights import VARIANTS, Golden
from tests.models.test_quantization import logits

EVEN = {"intermediate_size": 128}  # what blocks of 32 divide
MIXED = {"": "Q4_1", "down_proj.weight": "Q4_0", "embed_tokens.weight": "Q8_0", "lm_head.weight": "F16"}


def loaded(file: Path, dtype: str = "float32", quantization: str | None = None) -> tuple[Any, Params]:
    model = build(read_config(file), dtype, 192, quantization)
    return model, load(file, model, make_mesh(1), progress=False)


@pytest.mark.parametrize("variant", ["llama_gqa", "llama_tied", "rope_linear", "qwen2_untied", "qwen3_tied"])
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", variant, fields=scaling(variant))
    case = Golden.read(variant).cases[2]
    got = logits(*loaded(tmp_path / "m.gguf"), np.concatenate([case.prompt, case.tokens[:-1]]))
    np.testing.assert_allclose(got[len(case.prompt) - 1 :], case.logits, atol=1e-4)


def scaling(variant: str) -> dict[str, Any]:
    if variant != "rope_linear":
        return {}
    return {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 256,
    }


def test_attn_factor_multiplies_yarns_magnitude(tmp_path: Path) -> None:
    fields = {f"llama.rope.scaling.{name}": 4.0 for name in ("factor", "attn_factor")}
    write_gguf(tmp_path / "m.gguf", "llama_tied", fields={**fields, "llama.rope.scaling.type": "yarn"})
    assert rope(read_config(tmp_path / "m.gguf"), 256).magnitude == pytest.approx(4 * (0.1 * np.log(4) + 1))


def test_frequencies_of_llama_3_1_are_a_tensor(tmp_path: Path) -> None:
    """Divisors of the unstretched frequencies."""
    config = model_config(VARIANTS["rope_llama3"])
    unscaled = dataclasses.replace(config, rope=dataclasses.replace(config.rope, scaling=None))
    plain, stretched = rope(unscaled, 192), rope(config, 192)
    factors = np.array(plain.frequencies) / np.array(stretched.frequencies)
    write_gguf(tmp_path / "m.gguf", "rope_llama3", tensors={"rope_freqs.weight": factors.astype(np.float32)})
    case = Golden.read("rope_llama3").cases[3]
    got = logits(*loaded(tmp_path / "m.gguf"), np.concatenate([case.prompt, case.tokens[:-1]]))
    np.testing.assert_allclose(got[len(case.prompt) - 1 :], case.logits, atol=1e-4)


def test_four_bits_stay_four_bits(tmp_path: Path) -> None:
    """Their values are those of the gguf package. A parameter that is not entirely four bits is converted to
    the model's dtype."""
    stored = write_gguf(tmp_path / "m.gguf", "llama_gqa", {**MIXED, "v_proj.weight": "Q8_0"}, **EVEN)
    _, params = loaded(tmp_path / "m.gguf")
    layer = params["layers"][1]
    assert isinstance(layer["mlp"]["down"], Int4) and layer["mlp"]["down"].group == 32
    assert layer["mlp"]["down"].values.nbytes == stored["model.layers.1.mlp.down_proj.weight"].size // 2
    np.testing.assert_allclose(
        dequantize(layer["mlp"]["down"]), stored["model.layers.1.mlp.down_proj.weight"], atol=1e-6
    )
    gate_up = np.asarray(dequantize(layer["mlp"]["gate_up"]))
    np.testing.assert_allclose(gate_up[:, 1], stored["model.layers.1.mlp.up_proj.weight"], atol=1e-6)
    assert not is_weight(layer["attention"]["qkv"]) and isinstance(layer["attention"]["o"], Int4)
    np.testing.assert_array_equal(params["embed"], stored["model.embed_tokens.weight"])
    assert not is_weight(params["lm_head"])


def test_nothing_is_compiled_to_pack_matrices(tmp_path: Path) -> None:
    """It would be compiled at every start."""
    write_gguf(tmp_path / "m.gguf", "llama_gqa", {"": "Q4_1"}, **EVEN)
    before = compile_count()
    loaded(tmp_path / "m.gguf")
    assert compile_count() == before


def test_large_tensors_are_converted_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a whole, a vocabulary of a large model takes gigabytes as float32."""
    stored = write_gguf(tmp_path / "m.gguf", "llama_tied", {"": "Q8_0"}, **EVEN)
    rows: list[int] = []

    def counted(data: np.ndarray, kind: str) -> np.ndarray:
        rows.append(len(data))
        return dequantized(data, kind)

    monkeypatch.setattr("jengine.checkpoints.gguf.dequantized", counted)
    monkeypatch.setattr("jengine.checkpoints.stored.BLOCK", 1000)
    _, params = loaded(tmp_path / "m.gguf")
    vocabulary = stored["model.embed_tokens.weight"]
    np.testing.assert_array_equal(params["embed"][: len(vocabulary)], vocabulary)
    assert len(vocabulary) not in rows and sum(count == 1000 // 64 for count in rows) >= len(vocabulary) // 16


def test_logits_of_four_bits(tmp_path: Path) -> None:
    """Equal to those of the same weights as float32, obtained with quantization='none'."""
    write_gguf(tmp_path / "m.gguf", "llama_gqa", MIXED, **EVEN)
    tokens = Golden.read("llama_gqa").cases[3].prompt
    plain, params = loaded(tmp_path / "m.gguf", quantization="none")
    assert not any(is_weight(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_weight))
    np.testing.assert_allclose(
        logits(*loaded(tmp_path / "m.gguf"), tokens), logits(plain, params, tokens), atol=1e-4
    )


def test_other_quantizations_start_from_the_dequantized(tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "m.gguf", "llama_gqa", MIXED, **EVEN)
    _, params = loaded(tmp_path / "m.gguf", quantization="int8")
    down, want = params["layers"][0]["mlp"]["down"], stored["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(down, Quantized)
    np.testing.assert_allclose(dequantize(down), want, atol=np.abs(want).max() / 250)


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_blocks_stand_for_what_gguf_says(kind: str) -> None:
    """Random bits in every field."""
    number = gguf.GGMLQuantizationType[kind]
    size, each = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 2, each), np.uint8)
    halves = rng.uniform(-1, 1, (3, 2, 2)).astype(np.float16).view(np.uint8)
    # scales that are no NaN
    blocks[..., : min(4, each - size // 2)] = halves[..., : min(4, each - size // 2)]
    rows = blocks.reshape(3, -1)
    groups = _four_bits(rows, kind)
    assert groups.values.min() >= -8 and groups.values.max() <= 7 and groups.block == (1, 32)
    np.testing.assert_allclose(groups.dense(), gguf.dequantize(rows, number), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["BF16", "F16", "Q5_0", "Q5_1", "Q8_0"])
def test_other_kinds_become_dtype(kind: str, tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "m.gguf", "llama_tied", {"": kind}, **EVEN)
    _, params = loaded(tmp_path / "m.gguf")
    np.testing.assert_array_equal(
        params["layers"][0]["mlp"]["down"], stored["model.layers.0.mlp.down_proj.weight"]
    )


def test_configuration(tmp_path: Path) -> None:
    """Equal to that of the original checkpoint, except for the storage format."""
    ids = {"ggml.eos_token_id": 5, "ggml.eot_token_id": 7}
    write_gguf(tmp_path / "m.gguf", "llama_gqa", MIXED, tokenizer=ids, **EVEN)
    found = read_config(tmp_path / "m.gguf")
    wanted = model_config({**VARIANTS["llama_gqa"], **EVEN})
    assert dataclasses.replace(found, stored=None, eos_token_ids=(), dtype="float32", norm_eps=1e-5) == wanted
    assert found.eos_token_ids == (5, 7) and found.dtype == "bfloat16" and abs(found.norm_eps - 1e-5) < 1e-10
    assert found.stored is not None and (found.stored.form, found.stored.group, found.stored.offset) == (
        "int4",
        32,
        True,
    )
    write_gguf(tmp_path / "q4_0.gguf", "llama_gqa", {"": "Q4_0"}, **EVEN)
    symmetric = read_config(tmp_path / "q4_0.gguf").stored
    assert symmetric is not None and not symmetric.offset
    write_gguf(tmp_path / "plain.gguf", "llama_gqa")
    assert read_config(tmp_path / "plain.gguf").stored is None and has_output_head(
        tmp_path / "plain.gguf", wanted
    )


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama_tied")
    assert resolve(str(tmp_path)) == resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    (tmp_path / "config.json").write_text("{}")  # many repositories of GGUF files have one
    assert resolve(str(tmp_path)) == tmp_path / "m.gguf"
    write_gguf(tmp_path / "n.gguf", "llama_tied")
    with pytest.raises(ModelError, match=r"has several GGUF files; name one of them: m\.gguf, n\.gguf"):
        resolve(str(tmp_path))
    for files in TOKENIZER_FILES, WITHOUT_WEIGHTS:  # a folder's own files, without its weights
        assert resolve(str(tmp_path), files=files) == tmp_path
    (tmp_path / "model.safetensors").touch()
    assert resolve(str(tmp_path)) == tmp_path
    for name in ("x" * 300, "~no-such-user/x"):
        with pytest.raises(ModelError, match="cannot be read"):
            resolve(name)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"llama.expert_count": 4}, "experts are not supported"),
        ({"llama.attention.scale": 0.5}, r"field llama\.attention\.scale is not supported"),
        ({"llama.attention.sliding_window": 64}, "sliding_window is not supported"),
        (
            {"llama.rope.scaling.type": "odd", "llama.rope.scaling.factor": 2.0},
            "rope scaling 'odd' is not supported",
        ),
        ({"llama.rope.scaling.attn_factor": 0.5}, "attn_factor=0.5 is supported for type yarn, not none"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama_tied", fields=fields)
    with pytest.raises(ModelError, match=reason):
        read_config(tmp_path / "m.gguf")


def test_files_that_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, "llama_tied", tensors={"blk.0.extra.weight": np.zeros(4, np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.extra\.weight.*is not part of this model"):
        loaded(file)
    data = file.read_bytes()
    for content in (data[: len(data) // 2], data[:100], b"", b"not at all" * 20):
        file.write_bytes(content)
        with pytest.raises(ModelError, match="is not a complete GGUF file"):
            open_gguf(file)
    with pytest.raises(ModelError, match="cannot be read"):
        open_gguf(tmp_path / "none.gguf")


@pytest.mark.parametrize("kinds", [MIXED, {"": "Q8_0"}, {}])
def test_a_converted_file_is_the_same_model(kinds: dict[str, str], tmp_path: Path) -> None:
    """Four bits stay as they are: no parameter is rounded again."""
    file = tmp_path / "m.gguf"
    write_gguf(file, "llama_gqa", kinds, **EVEN)
    folder = convert(str(file), tmp_path / "out", progress=False)
    (model, params), (again, restored) = (
        loaded(file, read_config(file).dtype),
        loaded(folder, read_config(file).dtype),
    )
    assert (again.quantized, dataclasses.replace(again.config, converted=None)) == (
        model.quantized,
        model.config,
    )
    leaves, others = (jax.tree.leaves(tree) for tree in (params, restored))
    assert jax.tree.structure(params) == jax.tree.structure(restored)
    for leaf, other in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


def test_conversions_of_a_file_with_options(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama_gqa", MIXED, **EVEN)
    source = str(tmp_path / "m.gguf")
    _, dense = loaded(
        convert(source, tmp_path / "dense", dtype="float32", quantization="none", progress=False)
    )
    assert not any(is_weight(leaf) for leaf in jax.tree.leaves(dense, is_leaf=is_weight))
    eight, params = loaded(convert(source, tmp_path / "int8", quantization="int8", progress=False))
    assert eight.quantized == "int8" and isinstance(params["layers"][0]["mlp"]["down"], Quantized)
    kept = convert(source, tmp_path / "kept", progress=False)
    for quantization in ("int8", "none"):
        with pytest.raises(
            InvalidArgument, match=r"quantization=.*: must be None: the folder keeps its file's quantization"
        ):
            loaded(kept, quantization=quantization)


def test_a_field_with_a_wrong_length_is_refused(tmp_path: Path) -> None:
    """Lengths are checked before anything of this length is read, wherever the file is damaged."""
    file = tmp_path / "m.gguf"
    write_gguf(
        file,
        "llama_tied",
        tokenizer={"ggml.tokens": ["a", "b"], "ggml.scores": [0.5, 1.0], "ggml.model": "gpt2"},
    )
    data = file.read_bytes()
    head = data.index(b"output_norm.weight") + 64
    refused = 0
    for at in range(4, head):
        file.write_bytes(data[:at] + b"\xff" * 8 + data[at + 8 :])
        try:
            GgufFile(file)
        except ModelError:
            refused += 1
    assert refused > head // 2
    file.write_bytes(data[:4] + data[4:8][::-1] + data[8:])
    with pytest.raises(ModelError, match="is for big-endian machines"):
        GgufFile(file)


def test_what_the_package_gguf_reads(tmp_path: Path) -> None:
    """Fields and tensors of a file with every type of field, as the package that wrote it reads them."""
    fields = {
        "general.name": "ünïcode",
        "general.tags": ["a", "bc", ""],
        "general.numbers": [1, -2, 3],
        "general.floats": [0.5, 2.0],
    }
    write_gguf(
        tmp_path / "m.gguf",
        "llama_gqa",
        MIXED,
        fields={**fields, "general.flag": True, "general.count": 7, "general.rate": 0.25},
        **EVEN,
    )
    ours, theirs = GgufFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    read = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert {name: ours[name] for name in read} == read and sorted(ours.names("")) == sorted(read)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.kind, mine.shape) == (
            tensor.tensor_type.name,
            tuple(int(n) for n in reversed(tensor.shape)),
        )
        np.testing.assert_array_equal(mine.data, tensor.data)


@pytest.mark.parametrize("number", KINDS)
def test_number_formats(number: int) -> None:
    name, size, each = KINDS[number]
    kind = gguf.GGMLQuantizationType(number)
    assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (size, each))
    blocks = np.random.default_rng(0).integers(0, 64, (3, 2 * each), np.uint8)
    data = blocks.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
    np.testing.assert_array_equal(dequantized(data, name), gguf.dequantize(data, kind))


def test_names_of_tensors() -> None:
    """Those of gguf's tables, for all architectures."""
    for arch in ARCHITECTURES:
        number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
        names = gguf.get_tensor_name_map(number, 3)
        for base in NAMES:
            layered = base if base.startswith("model.") or base == "lm_head" else f"model.layers.2.{base}"
            if (known := names.get_name(layered)) is not None:  # llama has no norms of queries and keys
                assert _name(f"{layered}.weight") == f"{known}.weight"


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match="architecture 'mamba' is not supported; GGUF files of llama, qwen2, qwen3 are"
    ):
        read_config(tmp_path / "m.gguf")


def test_groups_that_devices_would_cut_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama_gqa", {"": "Q4_1"}, **EVEN)
    config = read_config(tmp_path / "m.gguf")
    assert config.hidden_size == 64
    build(config, "float32", 64, shards=2)
    with pytest.raises(InvalidArgument, match="tensor_parallel_size=4: cuts 64 inputs within groups of 32"):
        build(config, "float32", 64, shards=4)


@pytest.mark.parametrize("ending", ["<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<end_of_turn>"])
def test_tokens_that_end_a_turn_are_found_by_their_texts(ending: str, tmp_path: Path) -> None:
    """As in llama.cpp, since many files have no id for them."""
    tokens = {"ggml.tokens": ["a", "<s>", ending, "b"], "ggml.eos_token_id": 1}
    write_gguf(tmp_path / "m.gguf", "llama_gqa", tokenizer=tokens)
    assert read_config(tmp_path / "m.gguf").eos_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"llama.block_count": 2**31 - 1}, "num_hidden_layers=2147483647 must be at most 4096"),
        ({"llama.block_count": 500}, "num_hidden_layers=500, but there are tensors of only 2 layers"),
        ({"llama.attention.head_count": "x"}, "a field has the wrong type or value"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "tokenizer.ggml.eos_token_id='x' is not a token id"),
    ],
)
def test_fields_that_lie(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama_gqa", fields=fields)
    with pytest.raises(ModelError, match=f"m.gguf: {says}"):
        read_config(tmp_path / "m.gguf")
