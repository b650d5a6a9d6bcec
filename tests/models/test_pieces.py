"""Layouts of checkpoints' queries, keys and values: each fills the parameter that plain tensors fill, on any
number of devices.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from jengine.checkpoints.hugging_face import model_config
from jengine.checkpoints.safetensors import Tensor
from jengine.checkpoints.weights import assemble
from jengine.models.config import ModelConfig
from jengine.models.pieces import Piece, apart, grouped, interleaved, qkv_parts
from tests.golden.weights import VARIANTS

DIM, ROTARY = 6, 4
SHAPES = [
    (heads, kv_heads, shards)
    for heads, kv_heads in ((4, 1), (6, 3), (5, 1), (4, 4))
    for shards in (1, 2, 3, 8)
]


def config(heads: int, kv_heads: int, shards: int) -> ModelConfig:
    llama = model_config(VARIANTS["llama_gqa"])
    return dataclasses.replace(llama, num_heads=heads, num_kv_heads=kv_heads, head_dim=DIM, shards=shards)


def filled(config: ModelConfig, source: tuple[Piece, ...], tensors: dict[str, np.ndarray]) -> np.ndarray:
    shape = (config.num_kv_heads_padded, (config.group_size_padded + 2) * DIM)
    return assemble(
        jax.ShapeDtypeStruct(shape, "float32"),
        source,
        {name: Tensor(Path(), array) for name, array in tensors.items()},
    )


def numbered(config: ModelConfig) -> dict[str, np.ndarray]:
    """Rows of queries, keys and values; each element is a different number."""
    sizes = {"q": config.num_heads * DIM, "k": config.num_kv_heads * DIM, "v": config.num_kv_heads * DIM}
    return {
        part: 1000 * i + np.arange(1, size + 1, dtype=np.float32)
        for i, (part, size) in enumerate(sizes.items())
    }


@pytest.mark.parametrize(("heads", "kv_heads", "shards"), SHAPES)
def test_fused_by_kv_head(heads: int, kv_heads: int, shards: int) -> None:
    laid, plain = config(heads, kv_heads, shards), numbered(config(heads, kv_heads, shards))
    fused = np.concatenate([plain[part].reshape(kv_heads, -1) for part in "qkv"], axis=1).ravel()
    want = filled(laid, apart("qkv", qkv_parts(laid)), plain)
    np.testing.assert_array_equal(filled(laid, grouped("qkv", laid, qkv_parts(laid)), {"qkv": fused}), want)


@pytest.mark.parametrize("rotary", [ROTARY, DIM])
@pytest.mark.parametrize(("heads", "kv_heads", "shards"), SHAPES)
def test_neighbours_that_rotate_together(heads: int, kv_heads: int, shards: int, rotary: int) -> None:
    laid, plain = config(heads, kv_heads, shards), numbered(config(heads, kv_heads, shards))
    q, k, v = qkv_parts(laid)
    got = filled(laid, apart("qkv", (interleaved(q, DIM, rotary), interleaved(k, DIM, rotary), v)), plain)
    order = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, DIM)]
    reordered = {
        part: rows if part == "v" else rows.reshape(-1, DIM)[:, order].ravel() for part, rows in plain.items()
    }
    np.testing.assert_array_equal(got, filled(laid, apart("qkv", (q, k, v)), reordered))
