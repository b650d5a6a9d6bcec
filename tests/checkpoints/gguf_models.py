"""Tiny models as GGUF files, written with the gguf package like llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.golden.weights import VARIANTS, weights

# by the end of a tensor's name in Hugging Face's checkpoints; "" is of the other matrices
Kinds = Mapping[str, str]


def write_gguf(
    file: Path,
    variant: str,
    kinds: Kinds | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Writes a model. Returns the unquantized values of every tensor, by Hugging Face's names.

    Args:
        kinds: F32 where it says nothing.
        tokenizer: fields after tokenizer.
        fields: others, by their whole names.
        tensors: more, by GGUF's names.
        changes: to the variant's config.json.
    """
    config = {**VARIANTS[variant], **changes}
    arch = config["model_type"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, value in {
        **{f"tokenizer.{key}": value for key, value in (tokenizer or {}).items()},
        **(fields or {}),
    }.items():
        add(writer, name, value)
    arch_number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(arch_number, config["num_hidden_layers"])
    out = {}
    for name, values in weights(variant, config).items():
        ends = sorted((end for end in kinds or {} if name.endswith(end)), key=len)
        kind = gguf.GGMLQuantizationType[(kinds or {})[ends[-1]] if ends and values.ndim == 2 else "F32"]
        stored = gguf.quantize(values, kind)
        out[name] = gguf.dequantize(stored, kind)
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        for projection, count in heads.items():
            if arch == "llama" and f"self_attn.{projection}_proj" in name:
                apart = stored.reshape(count, 2, head_dim // 2, *stored.shape[1:])
                stored = np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(stored.shape)
        base, _, end = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(base)}.{end}", stored, raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    kinds = {
        bool: writer.add_bool,
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    kinds[type(value)](name, value)
