"""The generator of random models: its output can be read, and depends only on the seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import make_model
import numpy as np
import pytest
from safetensors.numpy import load_file

from jengine.checkpoints.hugging_face import model_config
from jengine.checkpoints.weights import load
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from jengine.text.tokenizer import Tokenizer

TINY = make_model.SHAPES["134m"] | {
    "vocab_size": 600,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}


def test_writes_a_readable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make_model.SHAPES, "tiny", TINY)
    monkeypatch.setattr(make_model, "TRAINED_VOCABULARY", 500)
    parameters = make_model.make_model("tiny", tmp_path, seed=3)
    weights = {name: w.astype(np.float32) for name, w in load_file(tmp_path / "model.safetensors").items()}
    assert sum(w.size for w in weights.values()) == parameters
    assert (weights["model.norm.weight"] == 1).all()
    gate = weights["model.layers.1.mlp.gate_proj.weight"]
    assert gate.shape == (64, 32)
    assert abs(gate.mean()) < 0.002 and gate.std() == pytest.approx(make_model.STANDARD_DEVIATION, rel=0.1)
    assert (gate == make_model.random_tensor("model.layers.1.mlp.gate_proj.weight", (64, 32), 3)).all()
    assert (gate != make_model.random_tensor("model.layers.0.mlp.gate_proj.weight", (64, 32), 3)).any()

    config = model_config(json.loads((tmp_path / "config.json").read_text()))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == config.vocab_size == 600
    assert (tokenizer.eos_token_id,) == config.eos_token_ids
    assert tokenizer.decode(tokenizer.encode("return 你 x")) == "return 你 x"
    assert len({tokenizer.token_text(i) for i in range(500, 600)}) == 100, "the fill has texts of its own"


def test_shapes_have_the_sizes_they_are_known_by() -> None:
    sizes = {
        name: make_model.parameters_of(make_model.tensor_shapes({**make_model.COMMON, **config}))
        for name, config in make_model.SHAPES.items()
    }
    assert sizes == {
        "134m": 124_668_672,
        "1b": 1_235_814_400,
        "8b": 8_030_261_248,
        "qwen3-0.6b": 596_049_920,
        "qwen3-30b-a3b": 30_532_122_624,
        "gpt-oss-20b": 20_914_757_184,
    }


SMALL = {"vocab_size": 600, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2}
SMALLER: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"intermediate_size": 64},
    "qwen3-30b-a3b": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss-20b": {"intermediate_size": 64, "num_local_experts": 4, "layer_types": ["full_attention"] * 2},
}


@pytest.mark.parametrize("shape", SMALLER)
def test_folders_of_other_families_are_read(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(make_model.SHAPES, "small", make_model.SHAPES[shape] | SMALL | SMALLER[shape] | heads)
    monkeypatch.setattr(make_model, "TRAINED_VOCABULARY", 500)
    monkeypatch.setattr(make_model, "POOL", 1 << 12)
    make_model.make_model("small", tmp_path, seed=3)
    config = model_config(json.loads((tmp_path / "config.json").read_text()))
    params = load(tmp_path, build(config, "bfloat16", 64), make_mesh(1), False)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(params))
