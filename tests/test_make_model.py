"""The generator of random models: its output can be read, and depends only on the seed."""

from __future__ import annotations

import json
from pathlib import Path

import make_model
import numpy as np
import pytest
from safetensors.numpy import load_file

from jengine.checkpoints.hugging_face import model_config
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
        name: sum(int(np.prod(shape)) for shape in make_model.tensor_shapes(config).values())
        for name, config in make_model.SHAPES.items()
    }
    assert sizes == {"134m": 124_668_672, "1b": 1_235_814_400, "8b": 8_030_261_248}
