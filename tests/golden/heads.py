"""Tiny models with heads that draft (MTP), and tiny EAGLE-3 heads: configurations and random weights, or
weights with which model and head follow the same rule.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.declaring import Shapes, attention, gated, linear
from tests.golden.variants import VARIANTS, tensor_shapes
from tests.golden.weights import uniform, weight, weights

# of a model's variant: where its head's layer is, and the layer of the model that it is like
NORMS = "input_layernorm", "post_attention_layernorm"
MTP = ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "mimo", "qwen3_next", "qwen3_5_text")
DRAFTS = 48  # in the vocabulary of an EAGLE-3 head
COUNTS = {"qwen3_next": {}, "qwen3_5_text": {"mtp_num_hidden_layers": 1}}  # of layers, in config.json


def mtp_config(variant: str) -> dict[str, Any]:
    return {**VARIANTS[variant], **COUNTS.get(variant, {"num_nextn_predict_layers": 1})}


def mtp_shapes(variant: str, config: dict[str, Any]) -> Shapes:
    """The head's tensors, with the names of published checkpoints."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    joined = (hidden, 2 * hidden)
    if variant == "mimo":
        name = "model.mtp_layers.0"
        like, prefix, projection = layers - 1, name, f"{name}.input_proj"
        norms = [f"{name}.{norm}" for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm")]
    elif variant.startswith("qwen3"):
        like, prefix, projection = config["layer_types"].index("full_attention"), "mtp.layers.0", "mtp.fc"
        norms = ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
    else:
        like, prefix = layers - 1, f"model.layers.{layers}"
        projection, norms = (
            f"{prefix}.eh_proj",
            [f"{prefix}.{n}" for n in ("enorm", "hnorm", "shared_head.norm")],
        )
    start = f"model.layers.{like}."
    found = {
        f"{prefix}.{name.removeprefix(start)}": shape
        for name, shape in tensor_shapes(config).items()
        if name.startswith(start)
    }
    return found | {f"{projection}.weight": joined} | {f"{norm}.weight": (hidden,) for norm in norms}


def mtp_weights(variant: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The model's, and its head's."""
    head = {name: weight(variant, name, shape) for name, shape in mtp_shapes(variant, config).items()}
    found = {**weights(variant, config), **head}
    if not variant.startswith("qwen3") and variant != "mimo":  # as published
        prefix = f"model.layers.{config['num_hidden_layers']}"
        found[f"{prefix}.embed_tokens.weight"] = found["model.embed_tokens.weight"].copy()
        found[f"{prefix}.shared_head.head.weight"] = found["lm_head.weight"].copy()
    return found


def write_mtp(folder: Path, variant: str, *, follows: bool = False, **changes: Any) -> None:
    """A model with a head. If it follows a rule, see `ruled`."""
    config = {**mtp_config(variant), **changes}
    found = mtp_weights(variant, config)
    write_folder(folder, config, ruled(found, config) if follows else found)


def eagle3_config(variant: str, speculators: bool = False, **changes: Any) -> dict[str, Any]:
    """config.json of a head for a Llama, as its authors write it, or as speculators does."""
    model = VARIANTS[variant]
    names = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rope_theta",
        "hidden_act",
    )
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, model["num_hidden_layers"]]}
    layer = {name: model[name] for name in (*names, "intermediate_size", "rms_norm_eps")}
    layer |= {"model_type": "llama", "num_hidden_layers": 1, "max_position_embeddings": 64}
    if not speculators:
        own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTS}
        return {**layer, **own, **ids, "dtype": "float32", **changes}
    own = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    own |= {"draft_vocab_size": DRAFTS, "norm_before_residual": True, "target_hidden_size": None}
    return {**own, **ids, "dtype": "float32", "transformer_layer_config": layer, **changes}


def eagle3_weights(variant: str, config: dict[str, Any], key: str = "eagle3") -> dict[str, np.ndarray]:
    """With d2t, as int64, and t2d."""
    speculators = "transformer_layer_config" in config
    layer = config.get("transformer_layer_config", config)
    hidden, drafts = layer["hidden_size"], config["draft_vocab_size"]
    name = "layers.0" if speculators else "midlayer"
    shapes = attention(f"{name}.self_attn", layer) | gated(f"{name}.mlp", hidden, layer["intermediate_size"])
    shapes |= {
        f"{name}.self_attn.{p}_proj.weight": (shapes[f"{name}.self_attn.{p}_proj.weight"][0], 2 * hidden)
        for p in "qkv"
    }
    shapes |= {f"{name}.{norm}.weight": (hidden,) for norm in (*NORMS, "hidden_norm")} | {
        "norm.weight": (hidden,)
    }
    shapes |= linear("fc", hidden, 3 * hidden) | linear("lm_head", drafts, hidden)
    if speculators:
        shapes |= linear("embed_tokens", layer["vocab_size"], hidden)
    found = {n: weight(f"{variant}/{key}", n, shape) for n, shape in shapes.items()}
    if drafts < layer["vocab_size"]:
        ids = targets(layer["vocab_size"], drafts)
        found |= {"d2t": ids - np.arange(drafts), "t2d": np.isin(np.arange(layer["vocab_size"]), ids)}
    return found


def targets(vocab: int, drafts: int) -> np.ndarray:
    """The model's tokens that a head may draft, int64[drafts]."""
    return np.sort(np.argsort(uniform("targets", vocab), kind="stable")[:drafts]).astype(np.int64)


def write_eagle3(folder: Path, variant: str, *, follows: bool = False, **changes: Any) -> None:
    config = eagle3_config(variant, **changes)
    found = eagle3_weights(variant, config)
    write_folder(folder, config, ruled_eagle3(found, config) if follows else found)


def following(vocab: int) -> np.ndarray:
    """The rule: each token's next one. A circle of tokens that heads may draft; all others lead to it."""
    circle = targets(vocab, DRAFTS)
    after = circle[np.arange(vocab) % DRAFTS]
    after[circle] = np.roll(circle, -1)
    return after


def ruled(found: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """A model whose next token follows its last one, with as many tokens as channels, and an MTP head that
    finds its next one from the model's hidden state before the token alone: off by one, it is always wrong.
    """
    found, ids = _silent(found), np.arange(config["vocab_size"])
    after = following(len(ids))
    found["model.embed_tokens.weight"] = np.eye(len(ids), dtype=np.float32)
    found["lm_head.weight"] = _matrix(after, ids)
    for name, array in found.items():
        if name.endswith((".eh_proj.weight", ".input_proj.weight", "mtp.fc.weight")):
            array[:] = 0
            hidden_first = name.endswith(".input_proj.weight")
            part = array[:, : len(ids)] if hidden_first else array[:, len(ids) :]
            part[:] = _matrix(after, ids)
        if name.endswith(".embed_tokens.weight"):
            array[:] = np.eye(len(ids))
        if name.endswith(".shared_head.head.weight"):
            array[:] = found["lm_head.weight"]
    return found


def ruled_eagle3(found: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The same for a head with fewer tokens. It reads the second of the three states. Its MLP moves on by one
    token, since the head's own states do not pass the first product again.
    """
    found = _silent(found)
    layer = config.get("transformer_layer_config", config)
    ids = np.arange(layer["vocab_size"])
    after, hidden = following(len(ids)), layer["hidden_size"]
    found["fc.weight"][:] = 0
    found["fc.weight"][:, hidden : 2 * hidden] = _matrix(after, ids)
    drafts = np.arange(len(found["lm_head.weight"])) + found["d2t"]
    found["lm_head.weight"][:] = np.eye(len(ids))[drafts]
    size = math.sqrt(hidden)  # of a unit vector after a norm
    for name, array in found.items():
        if name.endswith((".gate_proj.weight", ".up_proj.weight")):
            array[:] = np.eye(*array.shape)
        if name.endswith(".down_proj.weight"):
            moved = (_matrix(after, ids) - np.eye(len(ids))) * (1 + math.exp(-size)) / size
            array[:, : len(ids)] = moved
    return found


def write_followers(folder: Path, method: str) -> dict[str, Any]:
    """A model and a head of this method that follow the rule. Returns the option that names the head."""
    if method == "mtp":
        write_mtp(folder, "mimo", follows=True, vocab_size=64)
        return {"method": "mtp", "num_speculative_tokens": 3}
    config = {**VARIANTS["llama_gqa"], "vocab_size": 64}
    write_folder(folder, config, ruled(weights("llama_gqa", config), config))
    write_eagle3(folder / "head", "llama_gqa", follows=True, vocab_size=64, norm_before_residual=True)
    return {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": 3}


def _matrix(after: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Maps the unit vector of each token to that of the token after it."""
    return (after[None] == ids[:, None]).astype(np.float32)


def _silent(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Layers add nothing, and norms only scale."""
    out = {}
    for name, array in found.items():
        if name.endswith((".o_proj.weight", ".out_proj.weight", ".down_proj.weight")):
            array = np.zeros_like(array)
        elif "norm" in name and name.endswith(".weight"):
            array = np.ones_like(array)
        out[name] = array.copy()
    return out


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
