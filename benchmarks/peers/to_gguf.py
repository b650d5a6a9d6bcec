"""Converts Llama's weights from Hugging Face's layout to GGUF, for token ids only: its tokenizer has numbers
instead of text.

    python -m benchmarks.peers.to_gguf MODEL OUT F32|BF16|Q8_0

llama.cpp rotates neighbouring channels, while Hugging Face rotates halves, so rows of the query and key
projections are reordered. Norms stay float32, as in every GGUF file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    TokenType,
    get_tensor_name_map,
    quants,
)
from safetensors.torch import load_file


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of `[heads x (2 x half), in]` reordered to `[heads x (half x 2), in]`."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(model: Path, out: Path, kind: str) -> None:
    config = json.loads((model / "config.json").read_text())
    quantization = GGMLQuantizationType[kind]
    writer = GGUFWriter(out / "model.gguf", "llama")
    writer.add_file_type(LlamaFileType[{"F32": "ALL_F32"}.get(kind, f"MOSTLY_{kind}")])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocabulary = config["vocab_size"]
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(vocabulary)])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([TokenType.NORMAL] * vocabulary)

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        values = tensor.to(torch.float32).numpy()
        if name.endswith("q_proj.weight"):
            values = interleaved(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = interleaved(values, config["num_key_value_heads"])
        each = GGMLQuantizationType.F32 if values.ndim == 1 else quantization
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), quants.quantize(values, each), raw_dtype=each
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
