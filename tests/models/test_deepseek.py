"""Features of DeepSeek's checkpoints that the golden tests do not cover: fp8 blocks, multi-token prediction
layers, other model_types."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jengine.base.errors import ModelError
from jengine.checkpoints import load, read_config
from jengine.checkpoints.hugging_face import model_config
from jengine.models import Params, build
from jengine.parallel.mesh import make_mesh
from tests.golden.weights import VARIANTS, weights

CONFIG = {**VARIANTS["deepseek_v3"], "num_hidden_layers": 2}
BLOCK = 48
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}


def write(folder: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loaded(folder: Path) -> Params:
    return load(folder, build(read_config(folder), "float32", 64), make_mesh(1), progress=False)


def test_blocks_of_fp8(tmp_path: Path) -> None:
    """Every product's weight but the router's, as in DeepSeek V3's files; scales are of blocks that tensors
    may end within.
    """
    tensors, stored = weights("deepseek_v3", CONFIG), dict[str, np.ndarray]()
    for name, x in tensors.items():
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            stored[name] = x
            continue
        rows, columns = (-(-size // BLOCK) for size in x.shape)
        wide = np.pad(x, [(0, BLOCK * n - size) for n, size in zip((rows, columns), x.shape, strict=True)])
        scale = np.abs(wide.reshape(rows, BLOCK, columns, BLOCK)).max((1, 3)) / 448
        each = np.repeat(np.repeat(scale, BLOCK, 0), BLOCK, 1)[: x.shape[0], : x.shape[1]]
        numbers = (x / each).astype(ml_dtypes.float8_e4m3fn)
        stored |= {name: numbers, f"{name}_scale_inv": scale.astype(np.float32)}
        tensors[name] = numbers.astype(np.float32) * each.astype(np.float32)
    got = loaded(write(tmp_path / "fp8", stored, quantization_config=FP8))
    jax.tree.map(np.testing.assert_array_equal, got, loaded(write(tmp_path / "plain", tensors)))


def test_a_layer_that_predicts_further_ahead_is_skipped_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = weights("deepseek_v3", CONFIG)
    more = {
        name.replace(".layers.1.", ".layers.2."): x for name, x in tensors.items() if ".layers.1." in name
    }
    more["model.layers.2.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    with caplog.at_level(logging.WARNING, "jengine"):
        got = loaded(write(tmp_path / "more", tensors | more))
    assert f"{len(more)} tensors of model.layers.2 are not loaded" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, got, loaded(write(tmp_path / "plain", tensors)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported; noaux_tc is"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; sigmoid is"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"n_group": 3}, "n_routed_experts=8 is not a multiple of n_group=3"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 must be even"),
        (
            {"model_type": "deepseek_v2", "topk_method": "noaux_tc"},
            "topk_method 'noaux_tc' is not supported; greedy and group_limited_greedy",
        ),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob=true is not supported"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        model_config({**CONFIG, **changes})
