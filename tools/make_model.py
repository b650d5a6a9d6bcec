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
from functools import cache
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
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
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
GROUP = 32  # numbers of a scale in MXFP4, which takes a byte; two numbers share one
POOL = 1 << 24  # numbers from which the weights of experts are taken: drawing all of them would take minutes


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Each tensor's name and shape in Hugging Face's Llama, Qwen3 or gpt-oss; projections are `[out, in]`."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    kind = config["model_type"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (queries, hidden),
            layer + "self_attn.k_proj.weight": (keys, hidden),
            layer + "self_attn.v_proj.weight": (keys, hidden),
            layer + "self_attn.o_proj.weight": (hidden, queries),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
        if config["attention_bias"]:
            sizes = {"q": queries, "k": keys, "v": keys, "o": hidden}
            shapes |= {f"{layer}self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
        if kind.startswith("qwen3"):
            shapes |= {f"{layer}self_attn.{name}_norm.weight": (head,) for name in ("q", "k")}
        if kind == "gpt_oss":
            shapes[layer + "self_attn.sinks"] = (config["num_attention_heads"],)
            shapes |= _mxfp4_experts(layer + "mlp.", config["num_local_experts"], hidden, ffn)
            continue
        experts = config.get("num_experts")
        if experts:
            shapes[layer + "mlp.gate.weight"] = (experts, hidden)
            ffn = config["moe_intermediate_size"]
        for mlp in [f"mlp.experts.{e}." for e in range(experts)] if experts else ["mlp."]:
            shapes |= {
                f"{layer}{mlp}gate_proj.weight": (ffn, hidden),
                f"{layer}{mlp}up_proj.weight": (ffn, hidden),
                f"{layer}{mlp}down_proj.weight": (hidden, ffn),
            }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _mxfp4_experts(mlp: str, experts: int, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        mlp + "router.weight": (experts, hidden),
        mlp + "router.bias": (experts,),
    }
    for name, outputs, inputs in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
        groups = (experts, outputs, inputs // GROUP)
        shapes |= {
            f"{mlp}experts.{name}_blocks": (*groups, GROUP // 2),
            f"{mlp}experts.{name}_scales": groups,
            f"{mlp}experts.{name}_bias": groups[:2],
        }
    return shapes


def dtype_of(name: str) -> Any:
    return np.uint8 if name.endswith(("_blocks", "_scales")) else ml_dtypes.bfloat16


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Ones for norms and biases, 2^-7 for scales of MXFP4; otherwise normal values, with the standard
    deviation of Llama's initialization.
    """
    if len(shape) == 1:
        return np.ones(shape, ml_dtypes.bfloat16)
    if name.endswith("_scales"):
        return np.full(shape, 120, np.uint8)
    if ".experts." in name:
        pool = _pool(dtype_of(name), seed)
        return np.resize(np.roll(pool, -(zlib.crc32(name.encode()) % POOL)), shape)
    values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    values *= STANDARD_DEVIATION
    return values.astype(ml_dtypes.bfloat16)


@cache
def _pool(dtype: Any, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == np.uint8:
        return rng.integers(0, 256, POOL, np.uint8)
    return (STANDARD_DEVIATION * rng.standard_normal(POOL, np.float32)).astype(dtype)


def write_weights(file: BinaryIO, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """Write a safetensors file: the header's length in 8 bytes, the header in JSON, then the tensors without
    gaps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        dtype = np.dtype(dtype_of(name))
        start, end = end, end + dtype.itemsize * int(np.prod(shape))
        header[name] = {
            "dtype": "U8" if dtype == np.uint8 else "BF16",
            "shape": shape,
            "data_offsets": (start, end),
        }
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
    return parameters_of(shapes)


def parameters_of(shapes: dict[str, tuple[int, ...]]) -> int:
    """The number of parameters: two for each byte of MXFP4's blocks, none for its scales."""
    counts = {name: int(np.prod(shape)) for name, shape in shapes.items() if not name.endswith("_scales")}
    return sum(2 * count if name.endswith("_blocks") else count for name, count in counts.items())


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
