"""Records tiny quantized checkpoints as the package compressed-tensors writes them, and the logits that
transformers computes from them.

Run from the repository's root, in an environment with torch, transformers and compressed-tensors:
python -m tests.golden.record_quantized [NAME ...]

Each becomes a folder in tests/data/quantized: config.json, model.safetensors, and logits.npz: `prompt`
int32[length] and `logits` float32[length, vocab].
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.golden.weights import write_model

OUT = Path(__file__).parents[1] / "data" / "quantized"
VARIANT, CHANGES = (
    "llama_gqa",
    {"num_hidden_layers": 1, "intermediate_size": 128, "tie_word_embeddings": True},
)
PROMPT = [int(n) for n in np.random.default_rng(0).integers(0, 96, 40)]


def compressed_tensors(model: Any, folder: Path, **weights: Any) -> None:
    """Weights rounded to the nearest."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            rows, shared = module.weight.data, None
            if hasattr(module, "weight_global_scale"):
                shared = generate_gparam(rows.min(), rows.max())
                module.weight_global_scale.data = shared
            if args.group_size:
                rows = rows.reshape(rows.shape[0], -1, args.group_size)
            elif args.strategy == "tensor":
                rows = rows.reshape(1, -1)
            scale, zero = calculate_qparams(
                rows.amin(-1, keepdim=not args.group_size),
                rows.amax(-1, keepdim=not args.group_size),
                args,
                shared,
            )
            module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape).to(
                    module.weight_zero_point.dtype
                )
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
FORMATS: dict[str, Callable[[Any, Path], None]] = {
    "w4a16": lambda model, folder: compressed_tensors(model, folder, **FOUR, symmetric=True),
    "w8a16": lambda model, folder: compressed_tensors(
        model, folder, num_bits=8, type="int", strategy="channel", symmetric=True
    ),
    "fp8": lambda model, folder: compressed_tensors(
        model, folder, num_bits=8, type="float", strategy="channel", symmetric=True
    ),
    "nvfp4": lambda model, folder: compressed_tensors(
        model, folder, **FLOAT4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    ),
    "mxfp4": lambda model, folder: compressed_tensors(
        model, folder, **FLOAT4, strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
}


def read_float4_as_float32() -> None:
    """The package reads four-bit floats as bfloat16, which rounds their products by scales."""
    from compressed_tensors.compressors.nvfp4 import base

    base.unpack_fp4_from_uint8 = partial(base.unpack_fp4_from_uint8, dtype=torch.float32)


def record(name: str) -> None:
    read_float4_as_float32()
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as made:
        write_model(Path(plain), VARIANT, **CHANGES)
        FORMATS[name](AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), Path(made))
        found = next(Path(made).rglob("model.safetensors")).parent
        model = AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0].float().numpy()
        target = OUT / name
        target.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(found / file, target / file)
        np.savez_compressed(target / "logits.npz", prompt=np.array(PROMPT, np.int32), logits=logits)
        print(name, json.loads((target / "config.json").read_text())["quantization_config"])


if __name__ == "__main__":
    for name in sys.argv[1:] or FORMATS:
        record(name)
