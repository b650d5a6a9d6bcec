"""Make a model of a given shape with random weights, for measuring speed: a folder in Hugging Face's layout.

    python tools/make_model.py --shape 134m --out DIR

Weights are bfloat16. Each tensor is drawn from the seed and its name, and written before the next, so the
memory needed is that of the largest tensor. The tokenizer is byte-level BPE, trained on Python's standard
library. Made-up words fill the rest of the vocabulary, since random weights choose every id.
"""

from __future__ import annotations

import argparse
import json
import struct
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The name's 134 million are with 12 kv heads; with 4, as here, there are 125 million parameters.
SHAPES: dict[str, dict[str, Any]] = {
    "134m": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "1b": {  # Llama 3.2 1B
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_ROPE,
        "tie_word_embeddings": True,
    },
    "8b": {  # Llama 3.1 8B
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_ROPE | {"factor": 8.0},
        "tie_word_embeddings": False,
    },
}
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
TRAINED_VOCABULARY = 32000  # at most; the standard library's text fills no more
TRAINING_FILES = 400
STANDARD_DEVIATION = 0.02


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Each tensor's name and shape in Hugging Face's Llama; projections are `[out, in]`."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (queries, hidden),
            layer + "self_attn.k_proj.weight": (keys, hidden),
            layer + "self_attn.v_proj.weight": (keys, hidden),
            layer + "self_attn.o_proj.weight": (hidden, queries),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "mlp.gate_proj.weight": (ffn, hidden),
            layer + "mlp.up_proj.weight": (ffn, hidden),
            layer + "mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Ones for norms; otherwise normal values, with the standard deviation of Llama's initialization."""
    if len(shape) == 1:
        return np.ones(shape, ml_dtypes.bfloat16)
    values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    values *= STANDARD_DEVIATION
    return values.astype(ml_dtypes.bfloat16)


def write_weights(file: BinaryIO, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """Write a safetensors file: the header's length in 8 bytes, the header in JSON, then the tensors without
    gaps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    file.write(struct.pack("<Q", len(text)) + text)
    with tqdm(total=end, unit="B", unit_scale=True, desc="weights") as bar:
        for name, shape in shapes.items():
            bar.update(file.write(random_tensor(name, shape, seed).tobytes()))


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE with exactly `vocab_size` ids; 0 is <s>, 1 is </s>."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    blank = Tokenizer(models.BPE())
    blank.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, TRAINED_VOCABULARY),
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    blank.train_from_iterator(standard_library(), trainer)
    # No merge creates these words: encoding never produces them, but each decodes to its own text.
    spec = json.loads(blank.to_str())
    vocab: dict[str, int] = spec["model"]["vocab"]
    filler = (f"Ġx{i:05x}" for i in range(vocab_size))
    while len(vocab) < vocab_size:
        vocab.setdefault(next(filler), len(vocab))
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def standard_library() -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in folder.rglob("*.py") if not {"site-packages", "test", "tests"} & set(f.parts))
    for file in files[:TRAINING_FILES]:
        yield file.read_text(encoding="utf-8", errors="ignore")


def make_model(shape: str, out: Path, seed: int) -> int:
    """Write the folder; returns the number of parameters."""
    config: dict[str, Any] = {**COMMON, **SHAPES[shape]}
    shapes = tensor_shapes(config)
    out.mkdir(parents=True, exist_ok=True)
    make_tokenizer(config["vocab_size"]).save(str(out / "tokenizer.json"))
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    with (out / "model.safetensors").open("wb") as file:
        write_weights(file, shapes, seed)
    return sum(int(np.prod(s)) for s in shapes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="134m")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    parameters = make_model(options.shape, options.out, options.seed)
    print(f"{options.out}: {parameters / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
