"""Models in GGUF files: config.json fields, and tensors with the names of Hugging Face's checkpoints.

For Llama, llama.cpp stores queries and keys with the channels that rotate together next to each other. They
are reordered here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from jengine.base.errors import ModelError
from jengine.base.gguf_file import GgufFile, GgufTensor, dequantized, open_gguf
from jengine.checkpoints.stored import GroupedValues, StoredTensor, Tensor
from jengine.models.config import StoredWeights

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # llama.cpp's name -> model_type
INTERLEAVED = ("llama",)  # queries and keys are stored in the other order
# matrices of a layer
MATRICES = tuple(f"self_attn.{p}_proj" for p in "qkvo") + tuple(
    f"mlp.{p}_proj" for p in ("gate", "up", "down")
)
FREQUENCIES = "rope_freqs.weight"
FOUR_BITS, GROUP = ("Q4_0", "Q4_1", "Q4_K"), 32
FIELDS = {  # names in config.json, and in GGUF after the architecture's name
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}
NAMES = {  # of a tensor in Hugging Face's checkpoints, and in GGUF
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    "post_attention_layernorm": "ffn_norm",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Texts of tokens that end a turn or a text. llama.cpp stops at them too, since many files lack their ids.
ENDING = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
     "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "<|end_of_text|>",
     "<end_of_utterance>")
)  # fmt: skip
SCALING = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attn_factor": "rope.scaling.attn_factor",
}
KNOWN = {*FIELDS.values(), *SCALING.values()} | {
    *(
        "vocab_size",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.finetuned",
        "attention.value_length",
        "expert_count",
        "pooling_type",  # see sentence_transformers.py
    )
}


def config_fields(path: Path) -> dict[str, Any]:
    """The fields of the equivalent config.json.

    Raises:
        ModelError: the file is not a GGUF file, or its model is not supported.
    """
    file = open_gguf(path)
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture!r} is not supported; GGUF files of {', '.join(ARCHITECTURES)} are",
            file=path,
        )
    for name in file.names(f"{architecture}."):
        if name not in KNOWN:
            raise ModelError(f"field {architecture}.{name} is not supported", file=path)
    if file.get(f"{architecture}.expert_count", 0):
        raise ModelError("experts are not supported in GGUF files", file=path)
    known = {
        ours: file[f"{architecture}.{theirs}"]
        for ours, theirs in FIELDS.items()
        if f"{architecture}.{theirs}" in file
    }
    head_dim = known.get("head_dim") or known["hidden_size"] // known["num_attention_heads"]
    rotary = file.get(f"{architecture}.rope.dimension_count", head_dim)
    if rotary != head_dim or file.get(f"{architecture}.attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"rope.dimension_count and attention.value_length must be {head_dim}, the head's size", file=path
        )
    return {
        "model_type": ARCHITECTURES[architecture],
        **known,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[0]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **(
            {"attention_bias": True}
            if architecture in ("llama", "qwen3") and "blk.0.attn_q.bias" in file.tensors
            else {}
        ),
        "eos_token_id": _end_ids(file) or None,
        "rope_scaling": _rope_scaling(file, known["max_position_embeddings"]),
        "dtype": _dtype(file),
    }


def stored_weights(path: Path, layers: int) -> StoredWeights | None:
    """The format of matrices that stay in four bits in memory."""
    file = open_gguf(path)
    others, kinds = [], set()
    for name in (f"model.layers.{layer}.{matrix}.weight" for layer in range(layers) for matrix in MATRICES):
        kind = _kind(file, _name(name))
        kinds |= {kind} & {*FOUR_BITS}
        others += [] if kind in FOUR_BITS else [re.escape(name.removesuffix(".weight")) + "$"]
    if kinds:
        return StoredWeights(form="int4", group=GROUP, offset=kinds != {"Q4_0"}, others=tuple(others))
    return None


def read_gguf(path: Path, wanted: list[str], heads: tuple[int, int]) -> dict[str, Tensor]:
    """The file's tensors, with the wanted names if possible, otherwise with the file's names.

    Args:
        heads: numbers of query heads and of key heads.
    """
    file = open_gguf(path)
    tensors = dict(file.tensors)
    tensors.pop(FREQUENCIES, None)  # part of the configuration
    out: dict[str, Tensor] = {}
    for name in dict.fromkeys(wanted):
        if (stored := _name(name)) in tensors:
            interleaved = file.architecture in INTERLEAVED and re.search(r"\.([qk])_proj\.", name)
            count = 0 if not interleaved else heads[interleaved[1] == "k"]
            out[name] = Tensor(path, _tensor(tensors.pop(stored), count))
    return out | {name: Tensor(path, _tensor(tensor, 0)) for name, tensor in tensors.items()}


def _end_ids(file: GgufFile) -> list[int]:
    """Ids of all tokens that end a sequence, in ascending order.

    Raises:
        ModelError: one is not an id.
    """
    named = {name: file[name] for name in ENDS if name in file}
    for name, number in named.items():
        if type(number) is not int or number < 0:
            raise ModelError(f"{name}={number!r} is not a token id", file=file.path)
    tokens = file.get("tokenizer.ggml.tokens") or []
    return sorted({*named.values(), *(number for number, token in enumerate(tokens) if token in ENDING)})


def _name(name: str) -> str:
    """The file's name of a tensor; empty if it has none."""
    layer, base, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.(\w+)", name).groups()  # type: ignore[union-attr]
    known = NAMES.get(base)
    return "" if known is None else f"{known}.{kind}" if layer is None else f"blk.{layer}.{known}.{kind}"


def _kind(file: GgufFile, name: str) -> str:
    return file.tensors[name].kind if name in file.tensors else ""


def _dtype(file: GgufFile) -> str:
    """The dtype of activations: that of the matrices, unless these are quantized."""
    return {"F32": "float32", "F16": "float16"}.get(_kind(file, "blk.0.attn_q.weight"), "bfloat16")


def _rope_scaling(file: GgufFile, longest: int) -> dict[str, Any] | None:
    kind = file.get(f"{file.architecture}.rope.scaling.type", "none")
    attn_factor = file.get(f"{file.architecture}.rope.scaling.attn_factor", 1)
    if kind != "yarn" and attn_factor != 1:
        raise ModelError(f"rope.scaling.attn_factor={attn_factor} is supported for type yarn, not {kind}")
    if FREQUENCIES in file.tensors:  # a divisor for each frequency, as stored for Llama 3.1
        factors = file.floats(FREQUENCIES).tolist()
        lists = {"short_factor": factors, "long_factor": factors}
        return {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": longest,
            **lists,
        }
    if kind == "none":
        return None
    named = {
        ours: file[f"{file.architecture}.{theirs}"]
        for ours, theirs in SCALING.items()
        if f"{file.architecture}.{theirs}" in file
    }
    return {"rope_type": kind, **named}


def _tensor(tensor: GgufTensor, heads: int) -> np.ndarray | StoredTensor:
    """heads: number of heads whose rows are interleaved, or 0."""
    kind, shape = tensor.kind, tensor.shape

    def rows() -> np.ndarray:
        if not heads:
            return tensor.data
        apart = tensor.data.reshape(heads, shape[0] // heads // 2, 2, *tensor.data.shape[1:])
        return np.asarray(apart.swapaxes(1, 2).reshape(tensor.data.shape))

    if kind in ("F32", "F16"):
        return rows()
    if kind in FOUR_BITS and len(shape) == 2:
        return StoredTensor(shape, lambda: _four_bits(rows(), kind))
    return StoredTensor(
        shape,
        lambda: dequantized(rows(), kind),
        None if heads else lambda part: dequantized(tensor.data[part], kind),
    )


def _four_bits(rows: np.ndarray, kind: str) -> GroupedValues:
    """Blocks of 32 numbers, or of 256 with a scale and an offset for each 32."""
    blocks = np.ascontiguousarray(rows).reshape(
        rows.shape[0], -1, {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}[kind]
    )

    def half(start: int) -> np.ndarray:  # float16 [out, blocks]
        return (
            np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0].astype(np.float32)
        )

    if kind == "Q4_K":
        packed, d, low = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32), half(0), half(2)
        # six bits each: scales, offsets, both
        first, second, last = (blocks[..., start : start + 4] for start in (4, 8, 12))
        scale = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], -1) * d[..., None]
        offset = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], -1) * -low[..., None]
    else:
        packed = blocks[..., 4 if kind == "Q4_1" else 2 :].reshape(*blocks.shape[:2], 1, 16)
        scale = half(0)[..., None]
        offset = half(2)[..., None] if kind == "Q4_1" else -8 * scale
    values = np.stack([packed & 15, packed >> 4], -2).reshape(rows.shape[0], -1).astype(np.int8) - np.int8(8)
    by_group = [x.reshape(rows.shape[0], -1).astype(np.float32) for x in (scale, offset + 8 * scale)]
    return GroupedValues(values, by_group[0], None if kind == "Q4_0" else by_group[1], (1, GROUP))
