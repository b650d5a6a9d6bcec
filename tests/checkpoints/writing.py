"""Writes the folder of a layout: config.json, files with random tensors, and the tokenizer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers

from tests.checkpoints.layouts import Layout
from tests.checkpoints.pickled_models import archive, dictionary, rebuilt
from tests.checkpoints.quantized_models import (
    LINEAR,
    Quantizer,
    Tensors,
    awq,
    fp8,
    gptq,
    int8,
    packed_tensors,
    write_safetensors,
)
from tests.golden.variants import tensor_shapes
from tests.text import test_tekken
from tests.text.conftest import byte_fallback, byte_level

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
STORAGES = {"float16": "Half", "bfloat16": "BFloat16", "float32": "Float"}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
# What configurations leave out, and shapes of tensors depend on.
ASSUMED: dict[str, Any] = {"tie_word_embeddings": False, "num_key_value_heads": 4, "n_inner": 512}
# unless config.json says otherwise
TIED = ("falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "opt", "starcoder2")


def write(folder: Path, layout: Layout) -> Tensors:
    """Writes a folder. Returns the values of the model's tensors, by their names in checkpoints of the text
    model alone.
    """
    form, _, kind = layout.weights.partition(" ")
    if form == "gguf":
        return _write_gguf(folder / f"model-{kind}.gguf", layout, kind)
    (folder / "config.json").write_text(json.dumps(layout.config))
    if layout.rejected is not None and layout.rejected.startswith(
        ("model_type", "quantization_config", "alibi")
    ):
        return {}
    tensors = {
        name: _values(name, shape, layout.config)
        for name, shape in tensor_shapes(_complete(layout.config)).items()
    }
    own, new = layout.renamed
    stored = {
        new + name.removeprefix(own) if name.startswith(own) else name: array
        for name, array in tensors.items()
    }
    stored |= {name: _values(name, shape, layout.config) for name, shape in layout.extra.items()}
    if layout.weights in QUANTIZERS:
        _write_quantized(folder, stored, tensors, QUANTIZERS[layout.weights])
    else:
        WRITERS[layout.weights](folder, stored)
    TOKENIZERS[layout.tokenizer](folder)
    return {name.replace("language_model.", ""): array for name, array in tensors.items()}


def _complete(config: Any) -> dict[str, Any]:
    family, text = config["model_type"], config.get("text_config")
    if text is not None:
        return {**config, "text_config": {**ASSUMED, "tie_word_embeddings": family in TIED, **text}}
    return {**ASSUMED, "tie_word_embeddings": family in TIED, **config}


def _values(name: str, shape: tuple[int, ...], config: Any) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith(".attention.bias"):
        return np.ones(shape, np.uint8)
    return (0.05 * rng.standard_normal(shape)).astype(
        DTYPES.get(str(config.get("torch_dtype")), np.dtype(np.float32))
    )


def _write_quantized(folder: Path, stored: Tensors, tensors: Tensors, quantizer: Quantizer) -> None:
    for name in [name for name in stored if name.endswith(LINEAR)]:
        parts, dense = quantizer(stored.pop(name).astype(np.float32))
        tensors[name] = dense
        stored |= {f"{name.removesuffix('weight')}{part}": array for part, array in parts.items()}
    _shards(
        "model-{:05}-of-{:05}.safetensors", "model.safetensors.index.json", write_safetensors, folder, stored
    )


def _shards(
    name: str, index: str, writer: Callable[[Path, Tensors], object], folder: Path, tensors: Tensors
) -> None:
    """Two files, each with some tensors of every layer."""
    halves = [dict(list(tensors.items())[half::2]) for half in range(2)]
    files = [name.format(half + 1, 2) for half in range(2)]
    for file, half in zip(files, halves, strict=True):
        writer(folder / file, half)
    places = {tensor: file for file, half in zip(files, halves, strict=True) for tensor in half}
    size = sum(array.nbytes for array in tensors.values())
    (folder / index).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))


def _write_bin(file: Path, tensors: Tensors) -> None:
    entries = {}
    for name, array in tensors.items():
        strides = [stride // array.itemsize for stride in array.strides]
        entries[name] = rebuilt(name, array.size, 0, array.shape, strides, STORAGES[str(array.dtype)])
    archive(
        file, dictionary(**entries), **{f"data/{name}": array.tobytes() for name, array in tensors.items()}
    )


def _truncated(folder: Path, tensors: Tensors) -> None:
    file = folder / "model.safetensors"
    write_safetensors(file, tensors)
    file.write_bytes(file.read_bytes()[:-10])


def _one(name: str, writer: Callable[[Path, Tensors], object]) -> Callable[[Path, Tensors], object]:
    return lambda folder, tensors: writer(folder / name, tensors)


WRITERS: dict[str, Callable[[Path, Tensors], object]] = {
    "safetensors": _one("model.safetensors", write_safetensors),
    "shards": partial(
        _shards, "model-{:05}-of-{:05}.safetensors", "model.safetensors.index.json", write_safetensors
    ),
    "bin": _one("pytorch_model.bin", _write_bin),
    "bin shards": partial(
        _shards, "pytorch_model-{:05}-of-{:05}.bin", "pytorch_model.bin.index.json", _write_bin
    ),
    "consolidated": _one("consolidated.safetensors", write_safetensors),
    "tensorflow": lambda folder, _: (folder / "tf_model.h5").write_bytes(b"\x89HDF\r\n\x1a\n"),
    "truncated": _truncated,
}


def _blocks(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """FP8 with a scale for each 128 by 128 numbers."""
    rows, columns = weight.shape
    scale = np.array(
        [
            [np.abs(weight[i : i + 128, j : j + 128]).max() / 448 for j in range(0, columns, 128)]
            for i in range(0, rows, 128)
        ]
    )
    wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:rows, :columns].astype(np.float32)
    values = (weight / wide).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale.astype(np.float32)}, values.astype(np.float32) * wide


QUANTIZERS: dict[str, Quantizer] = {
    "awq": awq(128),
    "gptq": gptq(128, 4, symmetric=True),
    "gptq shuffled": gptq(128, 4, symmetric=True, shuffled=True),
    "w4a16": packed_tensors(128, symmetric=True),
    "w8a8": int8,
    "fp8 outputs": fp8("outputs"),
    "fp8 blocks": _blocks,
}


def _write_gguf(file: Path, layout: Layout, kind: str) -> Tensors:
    from tests.checkpoints.gguf_models import write_gguf
    from tests.text.test_gguf_tokenizer import described

    model_type = layout.config["model_type"]
    variant = {"llama": "llama_tied", "qwen3": "qwen3_tied"}[model_type]
    tokenizer = described(
        _trained("byte_level"), "gpt2", **{"ggml.pre": "llama-bpe" if model_type == "llama" else "qwen2"}
    )
    tokenizer["chat_template"] = TEMPLATE
    return write_gguf(
        file, variant, {"": kind, "embed_tokens.weight": "Q8_0"}, tokenizer, **dict(layout.config)
    )


@cache
def _trained(kind: str) -> tokenizers.Tokenizer:
    return {"byte_level": byte_level, "byte_fallback": byte_fallback}[kind]()


def _tokenizer_json(kind: str, folder: Path) -> None:
    _trained(kind).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _older(folder: Path) -> None:
    """GPT-2's files, without a tokenizer.json."""
    model = json.loads(_trained("byte_level").to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


TOKENIZERS: dict[str, Callable[[Path], object]] = {
    "byte_level": partial(_tokenizer_json, "byte_level"),
    "byte_fallback": partial(_tokenizer_json, "byte_fallback"),
    "tekken": test_tekken.write,
    "older": _older,
}
