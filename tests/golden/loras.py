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
    "qwen3_moe": DENSE,
    "mixtral": r"(q|k|v|o)_proj|w[123]",
    "qwen3_next": r"(q|k|v|o)_proj|in_proj_qkvz|in_proj_ba|out_proj|shared_expert_gate",
    "qwen3_5_text": rf"{DENSE}|in_proj_(qkv|z|a|b)|out_proj",
    "qwen3_untied": r"q_proj|embed_tokens|lm_head",
    "qwen2_tied": r"q_proj|embed_tokens|lm_head",
}
EXPERTS = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.weight")


class Lora(NamedTuple):
    """An adapter: the configuration, and tensors by the names in adapter_model.safetensors."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]


# plain; and ranks and scales by module, with rsLoRA
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8},
    "rs": {"r": 8, "lora_alpha": 4, "use_rslora": True, "rank_pattern": {r"layers\.0\..*": 2}},
}
VARIANTS_WITH_LORA = (
    "llama_gqa",
    "qwen3_tied",
    "gemma3",
    "phi3_window",
    "gpt_neox",
    "gpt2",
    "qwen3_moe",
    "mixtral",
    "qwen3_untied",
    "qwen2_tied",
)


def lora(variant: str, name: str, seed: str = "", config: dict[str, Any] | None = None) -> Lora:
    """An adapter of a variant. seed: others have other numbers. config: the model's, if it is another."""
    how = SETTINGS.get(name, SETTINGS["plain"])
    target = re.compile(rf"((?:.*\.)?)({FUSED.get(variant, DENSE)})\.weight")
    model = VARIANTS[variant] if config is None else config
    config = {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM", **how}
    config |= {
        "target_modules": rf"(.*\.)?({FUSED.get(variant, DENSE)})",
        "fan_in_fan_out": variant == "gpt2",
    }
    tensors = {}
    fused = name == "rs" and any(".experts." in one for one in tensor_shapes(model))
    if fused:  # transformers has one parameter for the gates and ups of all experts, and one for their downs
        config["target_modules"] = rf".*\.{ATTENTION}"
        config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
        tensors = _fused_experts(model, f"{variant}/{name}{seed}", how)
    shapes = tensor_shapes(model)
    if "lm_head" in FUSED.get(variant, DENSE):  # also of a head that is the embedding
        shapes |= {"lm_head.weight": shapes["model.embed_tokens.weight"]}
    for tensor, shape in shapes.items():
        if (found := target.fullmatch(tensor)) is None or len(shape) != 2:
            continue
        if fused and ".experts." in tensor:
            continue
        outs, inputs = shape[::-1] if variant == "gpt2" else shape
        module = found[1] + found[2]
        key = f"{variant}/{name}{seed}/{module}"
        pair = _pair(f"base_model.model.{module}", key, (outs, inputs), _rank(how, module))
        tensors |= _of_table(pair) if "embed_tokens" in module else pair
    return Lora(config, tensors)


def _pair(name: str, key: str, shape: tuple[int, int], rank: int, experts: int = 1) -> dict[str, np.ndarray]:
    """Both factors of a module's change, or of the changes of all experts."""
    outs, inputs = shape
    a, b = uniform(f"{key}/A", experts * rank * inputs), uniform(f"{key}/B", outs * rank * experts)
    return {
        f"{name}.lora_A.weight": (a.reshape(-1, inputs) / math.sqrt(inputs)).astype(np.float32),
        f"{name}.lora_B.weight": (0.15 * b.reshape(outs, -1)).astype(np.float32),
    }


def _of_table(pair: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As PEFT writes them: factors of the table's transpose, which have changed places."""
    a, b = pair
    return {
        b.replace("lora_B.weight", "lora_embedding_A"): np.ascontiguousarray(pair[b].T),
        a.replace("lora_A.weight", "lora_embedding_B"): np.ascontiguousarray(pair[a].T),
    }


def _rank(how: dict[str, Any], module: str) -> int:
    for pattern, rank in how.get("rank_pattern", {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return int(rank)
    return int(how["r"])


def _fused_experts(model: dict[str, Any], key: str, how: dict[str, Any]) -> dict[str, np.ndarray]:
    """As PEFT names them: the module of the second parameter is around that of the first."""
    layers: dict[str, list[tuple[int, int]]] = {}
    for tensor, shape in tensor_shapes(model).items():
        if (found := EXPERTS.fullmatch(tensor)) is not None:
            layers.setdefault(found[1].replace("block_sparse_moe", "mlp"), []).append(shape)  # type: ignore[arg-type]
    tensors = {}
    for layer, shapes in layers.items():
        experts, (hidden, ffn) = len(shapes) // 3, min(set(shapes), key=shapes.count)
        name, rank = f"base_model.model.{layer}", _rank(how, f"{layer}.gate_up_proj")
        tensors |= _pair(f"{name}.base_layer", f"{key}/{layer}/0", (2 * ffn, hidden), rank, experts)
        tensors |= _pair(name, f"{key}/{layer}/1", (hidden, ffn), rank, experts)
    return tensors


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
