"""Lightning attention: its state, its arithmetic, and checkpoints that contain its decays."""

from __future__ import annotations

import functools
import json
import math
import warnings
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jengine.checkpoints import load, read_config
from jengine.checkpoints.hugging_face import model_config
from jengine.models import Model, build
from jengine.parallel.mesh import make_mesh
from tests.golden.weights import write_model

M1 = json.loads((Path(__file__).parent.parent / "data" / "published_models.json").read_text())[
    "MiniMaxAI/MiniMax-M1-80k"
]["config"]


@functools.cache
def minimax_m1() -> Model:
    return build(model_config(M1), "bfloat16", 4096)


def test_a_state_is_a_matrix_for_each_head() -> None:
    full, state = minimax_m1().groups
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
    model = minimax_m1()
    operations = [entry.operations for entry in model.entries if entry.kind == "state"]
    assert operations == [4 * 64 * 128 * 128] * 70
    # linear: queries, keys, values, gates and output
    linear, full = 5 * 64 * 128 * 6144, 2 * (64 + 8) * 128 * 6144
    assert model.elements.layers == 70 * linear + 10 * full + 80 * 32 * 6144, "and routers"


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
