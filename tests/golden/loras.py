"""Tiny random LoRA adapters for the tiny models, in PEFT's format. Needs numpy only, and safetensors to write
a folder.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.golden.variants import VARIANTS, tensor_shapes
from tests.golden.weights import uniform

ATTENTION = r"(q|k|v|o)_proj"
DENSE = r"(q|k|v|o|gate|up|down)_proj"
FUSED = {
    "phi3_window": r"(qkv|o|gate_up|down)_proj",
    "gpt_neox": r"query_key_value|dense|dense_h_to_4h|dense_4h_to_h",
    "gpt2": r"c_attn|c_proj|c_fc",
    "qwen3_moe": ATTENTION,
}


class Lora(NamedTuple):
    """An adapter: the configuration, and tensors by the names in adapter_model.safetensors."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]


# plain; and ranks and scales by module, with rsLoRA
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8},
    "rs": {"r": 8, "lora_alpha": 4, "use_rslora": True, "rank_pattern": {r"layers\.0\..*": 2}},
}
VARIANTS_WITH_LORA = ("llama_gqa", "qwen3_tied", "gemma3", "phi3_window", "gpt_neox", "gpt2", "qwen3_moe")


def lora(variant: str, name: str, seed: str = "", config: dict[str, Any] | None = None) -> Lora:
    """An adapter of a variant. seed: others have other numbers. config: the model's, if it is another."""
    how = SETTINGS.get(name, SETTINGS["plain"])
    target = re.compile(rf"(.*\.)({FUSED.get(variant, DENSE)})\.weight")
    model = VARIANTS[variant] if config is None else config
    config = {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM", **how}
    config |= {"target_modules": rf".*\.({FUSED.get(variant, DENSE)})", "fan_in_fan_out": variant == "gpt2"}
    tensors = {}
    for tensor, shape in tensor_shapes(model).items():
        if (found := target.fullmatch(tensor)) is None or len(shape) != 2 or ".experts." in tensor:
            continue
        outs, inputs = shape[::-1] if variant == "gpt2" else shape
        module, r = found[1] + found[2], how["r"]
        for pattern, rank in how.get("rank_pattern", {}).items():
            r = rank if re.match(rf"(.*\.)?({pattern})$", module) else r
        key = f"{variant}/{name}{seed}/{module}"
        tensors[f"base_model.model.{module}.lora_A.weight"] = (
            1.0 / math.sqrt(inputs) * uniform(f"{key}/A", r * inputs).reshape(r, inputs)
        ).astype(np.float32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = (
            0.15 * uniform(f"{key}/B", outs * r).reshape(outs, r)
        ).astype(np.float32)
    return Lora(config, tensors)


def merged(tensors: dict[str, np.ndarray], adapter: Lora) -> dict[str, np.ndarray]:
    """A model's tensors, with an adapter of `lora` added to them."""
    config, found = adapter.config, dict(tensors)
    for name, a in adapter.tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b, rank = adapter.tensors[name.replace("lora_A", "lora_B")], len(a)
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        change = scale * b.astype(np.float64) @ a
        weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
        change = change.T if config["fan_in_fan_out"] else change
        found[weight] = (found[weight] + change).astype(np.float32)
    return found


def write_merged(folder: Path, base: Path, adapter: Lora) -> Path:
    """Writes the model of another folder with an adapter added to its weights."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(base, folder)
    tensors = merged(load_file(base / "model.safetensors"), adapter)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_lora(folder: Path, adapter: Lora) -> Path:
    """Writes the folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config))
    save_file(adapter.tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
