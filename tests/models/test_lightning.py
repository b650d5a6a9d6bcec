"""Lightning attention: its state, its arithmetic, and checkpoints that contain its decays."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jengine.capacity.planning.roofline import attention_elements, state_operations
from jengine.checkpoints import load, read_config
from jengine.checkpoints.hugging_face import model_config
from jengine.models import build
from jengine.models.cache import cache_groups
from jengine.parallel.mesh import make_mesh
from tests.golden.weights import write_model

M1 = json.loads((Path(__file__).parent.parent / "data" / "published_models.json").read_text())[
    "MiniMaxAI/MiniMax-M1-80k"
]["config"]


def test_a_state_is_a_matrix_for_each_head() -> None:
    config = model_config(M1)
    full, state = cache_groups(config)
    assert (full.kind, full.layers, full.token_bytes(2)) == (
        "full",
        tuple(range(7, 80, 8)),
        10 * 2 * 8 * 128 * 2,
    )
    assert state.kind == "state" and len(state.layers) == 70
    assert [(array.shape, array.sharded, array.dtype) for array in state.arrays] == [
        ((64, 128, 128), 0, "float32")
    ]


def test_operations_of_a_token_by_hand() -> None:
    """A token's key and value change each element of a state, and its query reads it: a multiplication and an
    addition each.
    """
    config = model_config(M1)
    assert state_operations(config) == 70 * 4 * 64 * 128 * 128
    assert attention_elements(config, 0) == 5 * 64 * 128 * 6144, "queries, keys, values, gates and output"
    assert attention_elements(config, 7) == 2 * (64 + 8) * 128 * 6144


def test_decays_in_a_checkpoint_are_not_read(tmp_path: Path) -> None:
    """Repositories that were converted for transformers have them."""
    write_model(tmp_path, "minimax")
    tensors = load_file(tmp_path / "model.safetensors")
    slope = {
        f"model.layers.1.self_attn.{name}": np.full((4, 1, 1), math.nan, np.float32)
        for name in ("slope_rate", "diagonal_decay")
    }
    save_file(tensors | slope, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = build(read_config(tmp_path), "float32", 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path, model, make_mesh(1), progress=False).keys() == model.params.keys()
