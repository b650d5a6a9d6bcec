"""gpt-oss's experts in MXFP4: their values, and that they stay in four bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jengine.base.errors import ModelError
from jengine.checkpoints import load, read_config
from jengine.checkpoints.hugging_face import model_config
from jengine.models import Params, build
from jengine.parallel.mesh import make_mesh
from pallas_kernels.products.weights import is_weight
from pallas_kernels.quantization.int4 import Int4
from pallas_kernels.quantization.quantized import dequantize
from tests.golden.weights import VARIANTS, weights
from tests.models.test_quantization import logits

CONFIG = {**VARIANTS["gpt_oss"], "intermediate_size": 96, "num_hidden_layers": 2}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of the OCP's specification of microscaling formats
TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6])
ROOT = Path(__file__).parent.parent.parent


def write(folder: Path, *, quantized: bool, without: str = "", **changes: Any) -> Path:
    """A checkpoint whose experts are random MXFP4 numbers, in that form or in float32."""
    from safetensors.numpy import save_file

    config = {**CONFIG, **changes}
    tensors = weights("gpt_oss", config)
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if ".experts." in name and not name.endswith("bias")]:
        experts, inputs, outs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outs, inputs // 32, 16), np.uint8)
        scales = rng.integers(121, 126, (experts, outs, inputs // 32), np.uint8)
        if quantized:
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(experts, outs, inputs // 32, 32)
            wide = (
                np.where(codes & 8, -1, 1)
                * E2M1[codes & 7]
                * np.exp2(scales.astype(np.float64) - 127)[..., None]
            )
            tensors[name] = np.ascontiguousarray(wide.reshape(experts, outs, inputs).swapaxes(1, 2)).astype(
                np.float32
            )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({**config, **({"quantization_config": MXFP4} if quantized else {})})
    )
    save_file(
        {name: x for name, x in tensors.items() if name != without},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def loaded(folder: Path, quantization: str | None = None, shards: int = 1) -> Params:
    return load(
        folder,
        build(read_config(folder), "float32", 64, quantization, shards),
        make_mesh(shards),
        progress=False,
    )


def plain(params: Params) -> Params:
    return jax.tree.map(lambda x: np.asarray(dequantize(x) if is_weight(x) else x), params, is_leaf=is_weight)


def test_weights_are_what_the_format_says_in_four_bits_and_converted(tmp_path: Path) -> None:
    four, wide = write(tmp_path / "four", quantized=True), write(tmp_path / "wide", quantized=False)
    kept, converted, want = loaded(four), loaded(four, "none"), loaded(wide)
    kinds = [leaf for leaf in jax.tree.leaves(kept, is_leaf=is_weight) if is_weight(leaf)]
    assert len(kinds) == 4 and all(
        isinstance(leaf, Int4) and leaf.kind == "e2m1" and leaf.group == 32 for leaf in kinds
    )
    for got in kept, converted:
        jax.tree.map(np.testing.assert_array_equal, plain(got), plain(want))
    model = build(read_config(four), "float32", 64)
    np.testing.assert_allclose(
        logits(model, kept, TOKENS), logits(build(read_config(wide), "float32", 64), want, TOKENS), atol=2e-4
    )  # products of four bits sum in another order


def test_weights_may_be_quantized_otherwise(tmp_path: Path) -> None:
    model = build(read_config(write(tmp_path / "four", quantized=True)), "float32", 64, "int8")
    assert not any(isinstance(leaf, Int4) for leaf in jax.tree.leaves(model.params, is_leaf=is_weight))
    assert load(tmp_path / "four", model, make_mesh(1), progress=False)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    with pytest.raises(ModelError, match=rf"{name}.*is missing"):
        loaded(write(tmp_path / "four", quantized=True, without=name))


@pytest.mark.parametrize(
    ("scale", "message"), [(193, r"a scale of 2\^66; at most 2\^65"), (255, "a scale of NaN")]
)
def test_scales_that_kernels_cannot_take_are_refused(scale: int, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "four", quantized=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 0, 0] = 192
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded(folder)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 0, 0] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"layers.1.mlp.experts.down_proj.*{message}"):
        loaded(folder)


def same_on_two_devices(folder: Path) -> bool:
    """Each device's inputs of down are padded with zeros to whole groups."""
    four, wide = (
        loaded(write(folder / name, quantized=name == "four"), shards=2) for name in ("four", "wide")
    )

    def same(got: np.ndarray, want: np.ndarray) -> bool:
        missing = [(0, mine - theirs) for mine, theirs in zip(got.shape, want.shape, strict=True)]
        return np.array_equal(got, np.pad(want, missing))

    assert four["layers"][0]["mlp"]["down"].shape == (6, 64, 128) != wide["layers"][0]["mlp"]["down"].shape
    return all(jax.tree.leaves(jax.tree.map(same, plain(four), plain(wide))))


@pytest.mark.full
def test_devices_share_whole_groups(tmp_path: Path) -> None:
    code = "import sys, pathlib; from tests.checkpoints.test_mxfp4 import same_on_two_devices; "
    code += "print(same_on_two_devices(pathlib.Path(sys.argv[1])))"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip() == "True", run.stderr


def test_a_device_has_whole_groups() -> None:
    """gpt-oss's 2880 inputs are padded, so that four and eight devices take their own."""
    fields = {
        **CONFIG,
        "intermediate_size": 2880,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    config = model_config({**fields, "quantization_config": MXFP4})
    for shards, size in ((2, 2880), (4, 2944), (8, 3072)):
        down = build(config, "bfloat16", 64, shards=shards).params["layers"][0]["mlp"]["down"]
        assert down.shape == (6, 2880, size) and isinstance(down, Int4)
