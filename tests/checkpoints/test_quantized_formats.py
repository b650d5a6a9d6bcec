"""Quantized checkpoints: the values of their weights, their form in memory, and rejected ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jengine.base.errors import ModelError
from jengine.capacity.planning.memory import described, formats_of
from jengine.checkpoints import load, read_config
from jengine.checkpoints.hugging_face import model_config
from jengine.checkpoints.quantized_formats import stored_weights
from jengine.core.config import EngineConfig
from jengine.core.quantization import QUANTIZATIONS
from jengine.devices.device_spec import device_spec
from jengine.engine.setup.shapes import describe
from jengine.execution.kernels import described as described_kernels
from jengine.execution.kernels import implementations
from jengine.models import Params, build
from jengine.models.config import StoredWeights
from jengine.parallel.mesh import make_mesh
from pallas_kernels.products.weights import is_weight, product, stored
from pallas_kernels.quantization.int4 import Int4
from pallas_kernels.quantization.quantized import Quantized, dequantize, quantize
from tests.checkpoints.quantized_models import (
    VARIANT,
    Quantizer,
    awq,
    fp8,
    gptq,
    int8,
    nvfp4,
    packed_tensors,
    write_quantized,
)
from tests.golden.weights import VARIANTS
from tests.models.test_quantization import logits


def compressed(form: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "input_activations": inputs,
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FOUR = {"num_bits": 4, "strategy": "group", "group_size": 32}
FLOAT = {"type": "float"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "model.layers.*.router*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
TOKENS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
GROUPED = {**TOKENS, "type": "float", "strategy": "group", "group_size": 128}
STATIC = {**TOKENS, "dynamic": False, "strategy": "tensor"}
CASES: dict[str, tuple[dict[str, Any], Quantizer, Any]] = {  # and the form in memory; None is dtype
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq(32),
        "int4",
    ),
    "gptq": (GPTQ, gptq(32, 4, symmetric=True), "int4"),
    "gptq zeros": ({**GPTQ, "sym": False}, gptq(32, 4, symmetric=False), "int4"),
    "gptq v2": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(32, 4, symmetric=False, v2=True),
        "int4",
    ),
    "gptq shuffled": ({**GPTQ, "desc_act": True}, gptq(32, 4, symmetric=True, shuffled=True), None),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, gptq(32, 8, symmetric=True), None),
    "w4a16": (compressed("pack-quantized", **FOUR), packed_tensors(32, symmetric=True), "int4"),
    "w4a16 zeros": (
        compressed("pack-quantized", **FOUR, symmetric=False),
        packed_tensors(32, symmetric=False),
        "int4",
    ),
    "w8a8": (compressed("int-quantized"), int8, "int8"),
    "fp8 outputs": (compressed("float-quantized", **FLOAT), fp8("outputs"), "float8_e4m3fn"),
    "fp8 tensor": (compressed("float-quantized", **FLOAT, strategy="tensor"), fp8("all"), "float8_e4m3fn"),
    "fp8 block": (
        compressed("float-quantized", **FLOAT, strategy="block", block_structure=[48, 48]),
        fp8("blocks"),
        None,
    ),
    "nvfp4 of Model Optimizer": (MODELOPT, nvfp4, "e2m1"),
    "fp8 of Model Optimizer": ({**MODELOPT, "quant_algo": "FP8"}, fp8("all"), "float8_e4m3fn"),
    "fp8 static": ({**FP8, "activation_scheme": "static"}, fp8("all"), "float8_e4m3fn"),
    "fp8 static of transformers": (
        {**FP8, "activation_scheme": "static"},
        fp8("all", "weight_scale_inv", inputs="activation_scale"),
        "float8_e4m3fn",
    ),
    "fp8 128 x 128": ({**FP8, "weight_block_size": [48, 48]}, fp8("blocks", "weight_scale_inv"), None),
}


def loaded(folder: Path, quantization: str | None = None) -> Params:
    return load(folder, build(read_config(folder), "float32", 64, quantization), make_mesh(1), progress=False)


@pytest.mark.parametrize("name", CASES)
def test_weights_stand_for_what_the_format_says(name: str, tmp_path: Path) -> None:
    config, quantizer, form = CASES[name]
    stored = write_quantized(tmp_path, config, quantizer)
    layer = loaded(tmp_path)["layers"][1]
    for leaf in (
        layer["mlp"]["down"],
        layer["mlp"]["gate_up"],
        layer["attention"]["qkv"],
        layer["attention"]["o"],
    ):
        assert (leaf.kind if isinstance(leaf, Int4 | Quantized) else None) == form
        inputs = name.startswith("fp8 static") or name == "fp8 of Model Optimizer"
        assert not isinstance(leaf, Quantized) or leaf.inputs == inputs
    down, gate_up = (layer["mlp"][part] for part in ("down", "gate_up"))
    down, gate_up = (np.asarray(dequantize(leaf) if is_weight(leaf) else leaf) for leaf in (down, gate_up))
    np.testing.assert_allclose(down, stored["model.layers.1.mlp.down_proj.weight"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        gate_up[:, 0], stored["model.layers.1.mlp.gate_proj.weight"], rtol=1e-5, atol=1e-6
    )
    plain = loaded(tmp_path, "none")["layers"][1]["attention"]
    assert not is_weight(plain["qkv"])
    np.testing.assert_allclose(
        plain["o"], stored["model.layers.1.self_attn.o_proj.weight"], rtol=1e-5, atol=1e-6
    )


def test_quantization_on_load_starts_from_the_dequantized(tmp_path: Path) -> None:
    stored = write_quantized(tmp_path, CASES["w8a8"][0], int8)
    down = loaded(tmp_path, "w8a8")["layers"][0]["mlp"]["down"]
    want = stored["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(down, Quantized)
    # roundings of a block of inputs, mixed
    np.testing.assert_allclose(dequantize(down), want, atol=np.abs(want).max() / 50)


def test_large_groups_repeat_their_scales(tmp_path: Path) -> None:
    """Of 64 inputs where the kernel has them; a module that the configuration excludes stays as it is."""
    config = {**GPTQ, "group_size": 64, "dynamic": {"-:.*down_proj": {}}}
    stored = write_quantized(tmp_path, config, gptq(64, 4, symmetric=True), plain=("down_proj.weight",))
    mlp = loaded(tmp_path)["layers"][0]["mlp"]
    assert isinstance(mlp["gate_up"], Int4) and mlp["gate_up"].group == 64
    np.testing.assert_array_equal(mlp["down"], stored["model.layers.0.mlp.down_proj.weight"])
    assert stored_weights({**GPTQ, "group_size": 256}) == StoredWeights(form="int4", group=128, others=())


BLOCKS = {"hidden_size": 256, "intermediate_size": 320}


@pytest.mark.parametrize(
    "config",
    [
        {**FP8, "weight_block_size": [128, 128]},
        pytest.param(
            compressed("float-quantized", **FLOAT, strategy="block", block_structure=[128, 128]),
            marks=pytest.mark.full,
        ),
    ],
)
def test_blocks_of_128_inputs_stay_in_eight_bits(config: dict[str, Any], tmp_path: Path) -> None:
    """The last block of outputs may be smaller. The 320 inputs of `down` are not whole blocks."""
    name = "weight_scale_inv" if config["quant_method"] == "fp8" else "weight_scale"
    stored = write_quantized(tmp_path, config, fp8("blocks", name, block=128), **BLOCKS)
    layer = loaded(tmp_path)["layers"][1]
    down, gate_up = layer["mlp"]["down"], layer["mlp"]["gate_up"]
    assert (
        isinstance(gate_up, Quantized)
        and gate_up.by_group
        and gate_up.scale.shape == (320, 2, 2)
        and gate_up.inputs == (config["quant_method"] == "fp8")
    )
    np.testing.assert_allclose(
        dequantize(gate_up)[:, 1], stored["model.layers.1.mlp.up_proj.weight"], rtol=1e-6
    )
    assert isinstance(layer["attention"]["qkv"], Quantized) and not is_weight(down)
    np.testing.assert_allclose(down, stored["model.layers.1.mlp.down_proj.weight"], rtol=1e-6)
    read = read_config(tmp_path)
    assert read.stored is not None
    of_floats = replace(read, stored=replace(read.stored, inputs=False))
    kept, plain = (build(of_floats, "float32", 64, quantization) for quantization in (None, "none"))
    params = [load(tmp_path, model, make_mesh(1), progress=False) for model in (kept, plain)]
    np.testing.assert_allclose(
        logits(kept, params[0], np.arange(9)), logits(plain, params[1], np.arange(9)), atol=1e-4
    )


def test_blocks_are_converted_on_load_where_no_kernel_multiplies_by_them(tmp_path: Path) -> None:
    write_quantized(
        tmp_path,
        {**FP8, "weight_block_size": [128, 128]},
        fp8("blocks", "weight_scale_inv", block=128),
        **BLOCKS,
    )
    config = read_config(tmp_path)
    assert config.stored is not None
    spec = describe(EngineConfig.of("MODEL", {"max_model_len": 64}), config, make_mesh(1), tmp_path)
    assert spec.model.config.stored is None
    assert not any(is_weight(leaf) for leaf in jax.tree.leaves(spec.params, is_leaf=is_weight))


def test_inputs_are_quantized_by_group_where_a_kernel_multiplies_groups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**FP8, "weight_block_size": [128, 128]}
    write_quantized(tmp_path, config, fp8("blocks", "weight_scale_inv", block=128), **BLOCKS)
    options = EngineConfig(model=str(tmp_path), max_model_len=64, dtype="bfloat16")
    for device, inputs in (("h100", "float8_e4m3fn"), ("l4", None), ("a100", None)):
        caplog.clear()
        with caplog.at_level("WARNING", "jengine"):
            spec = described(options, device_spec(device))
        form = stored(spec.params["layers"][0]["mlp"]["gate_up"]).format
        assert (form.bits, form.group, form.inputs) == (8, 128, inputs)
        assert (spec.model.format.inputs, formats_of(spec).product) == (inputs, inputs or "bfloat16")
        assert ("which no product here does" in caplog.text) == (inputs is None)
        assert (not caplog.records) == (inputs is not None)
        if inputs is not None:
            chosen = described_kernels(implementations(spec))
            assert "fp8 inputs by group" in chosen and "row quantization" in chosen


def test_groups_of_16_stay_in_four_bits() -> None:
    """Hopper's kernels take groups of 32 and more; Ampere's take these, also on Hopper."""
    data = Path(__file__).parents[1] / "data" / "quantized"
    for name in ("nvfp4", "mxfp4"):
        options = EngineConfig(model=str(data / name), max_model_len=64, dtype="bfloat16")
        for spec in (
            described(options, device_spec("h100")),
            described(options, device_spec("l4")),
            describe(options, read_config(data / name), make_mesh(1), data / name),
        ):
            assert is_weight(spec.params["layers"][0]["mlp"]["down"])


@pytest.mark.parametrize(
    "ignore",
    [
        "model.layers.0.mlp.down_proj",
        "model.language_model.layers.0.mlp.down_proj",  # names of a model with images
        "language_model.model.layers.0.mlp.down_proj",
        r"re:.*layers\.0\.mlp\.down_proj$",
    ],
)
def test_modules_that_are_ignored(ignore: str, tmp_path: Path) -> None:
    config = {**compressed("pack-quantized", **FOUR), "ignore": ["lm_head", ignore]}
    write_quantized(
        tmp_path, config, packed_tensors(32, symmetric=True), plain=("layers.0.mlp.down_proj.weight",)
    )
    layers = loaded(tmp_path)["layers"]
    assert not is_weight(layers[0]["mlp"]["down"]) and isinstance(layers[1]["mlp"]["down"], Int4)


@pytest.mark.parametrize(
    "order, kept", [(None, 1), ("static", 1), ("weight", 1), ("group", 0), ("dynamic", 0)]
)
def test_groups_of_consecutive_inputs_stay_in_four_bits(order: str | None, kept: bool) -> None:
    stored = stored_weights(compressed("pack-quantized", **FOUR, actorder=order))
    assert (stored is not None) == kept


@pytest.mark.parametrize("name", ["model.layers.1.self_attn", "model.language_model.layers.1.self_attn"])
def test_modules_that_are_not_converted(name: str) -> None:
    stored = stored_weights({**FP8, "modules_to_not_convert": [name]})
    assert stored is not None
    [pattern] = stored.others
    assert re.match(pattern, "model.layers.1.self_attn.q_proj")
    assert not re.match(pattern, "model.layers.0.self_attn.q_proj")


def test_logits_are_those_of_the_dequantized(tmp_path: Path) -> None:
    write_quantized(tmp_path, CASES["awq"][0], awq(32))
    config, tokens = read_config(tmp_path), np.arange(40)
    kept, plain = (build(config, "float32", 64, quantization) for quantization in (None, "none"))
    params = [load(tmp_path, model, make_mesh(1), progress=False) for model in (kept, plain)]
    np.testing.assert_allclose(logits(kept, params[0], tokens), logits(plain, params[1], tokens), atol=1e-4)


@pytest.mark.parametrize("name", ["w4a16", "w8a16", "fp8", "nvfp4", "mxfp4"])
def test_what_the_formats_own_package_writes(name: str) -> None:
    """Logits equal those of transformers for the same files."""
    folder = Path(__file__).parents[1] / "data" / "quantized" / name
    config, golden = read_config(folder), np.load(folder / "logits.npz")
    assert config.stored is not None
    model = build(config, "float32", 64)
    params = load(folder, model, make_mesh(1), progress=False)
    assert is_weight(params["layers"][0]["mlp"]["down"])
    np.testing.assert_allclose(logits(model, params, golden["prompt"]), golden["logits"], atol=1e-4)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not supported; awq, compressed-tensors, fp8, gptq, modelopt",
        ),
        ({"quant_method": "awq"}, "bits=None is not supported; 4 are"),
        (
            {"quant_method": "awq", "bits": 4, "version": "marlin"},
            "version='marlin' is not supported; gemm are",
        ),
        ({**GPTQ, "bits": 3}, "bits=3 is not supported; 4, 8 are"),
        (
            {**GPTQ, "checkpoint_format": "marlin"},
            "checkpoint_format='marlin' is not supported; gptq, gptq_v2 are",
        ),
        (compressed("mixed-precision"), "format='mixed-precision' is not supported"),
        (compressed("nvfp4-pack-quantized"), "weights='int8' is not supported; float4 are"),
        (
            compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=32),
            r"weights\.group_size=32 is not supported; 16 are",
        ),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "quant_algo='MIXED_PRECISION' is not supported"),
        (
            compressed("int-quantized", inputs={**TOKENS, "strategy": "column"}),
            r"input_activations\.strategy='column' is not supported; tensor, channel, token, group,",
        ),
        (
            compressed("int-quantized", inputs={**TOKENS, "dynamic": "global"}),
            r"input_activations\.dynamic='global' is not supported",
        ),
        (
            {**FP8, "activation_scheme": "dynamic_per_channel"},
            "activation_scheme='dynamic_per_channel' is not supported; dynamic, static, None are",
        ),
        (compressed("pack-quantized", num_bits=2), "config_groups: weights='int2' is not supported"),
        (
            {**compressed("int-quantized"), "transform_config": {"config_groups": {}}},
            r"transform_config=.* is not supported",
        ),
    ],
)
def test_what_is_refused(quantization: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        model_config({**VARIANTS[VARIANT], "quantization_config": quantization})


def test_a_checkpoint_that_is_not_what_its_configuration_says(tmp_path: Path) -> None:
    write_quantized(tmp_path, GPTQ, gptq(32, 4, symmetric=True), plain=("o_proj.weight",))
    with pytest.raises(
        ModelError, match=r"self_attn\.o_proj\.weight: is not stored as the configuration says"
    ):
        loaded(tmp_path)
    del_part(tmp_path, ".scales")
    with pytest.raises(ModelError, match=r"_proj\.scales: is missing"):
        loaded(tmp_path)
    write_quantized(tmp_path, MODELOPT, nvfp4)
    del_part(tmp_path, ".weight_scale_2")
    with pytest.raises(ModelError, match=r"_proj\.weight_global_scale: is missing"):
        loaded(tmp_path)


def del_part(folder: Path, end: str) -> None:
    """Remove one tensor from a file's header."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header[next(name for name in header if name.endswith(end))]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("config", "wanted", "applied"),
    [
        (compressed("int-quantized"), "", False),
        (compressed("int-quantized", inputs=TOKENS), "int8 dynamic by token", True),
        (compressed("int-quantized", inputs={**TOKENS, "dynamic": False}), "int8 static by token", True),
        (
            compressed("int-quantized", inputs={**TOKENS, "dynamic": False, "strategy": "tensor"}),
            "int8 static by tensor",
            True,
        ),
        (compressed("int-quantized", inputs={**TOKENS, "num_bits": 4}), "int4 dynamic by token", False),
        (
            compressed("int-quantized", inputs={**TOKENS, "symmetric": False}),
            "asymmetric int8 dynamic by token",
            False,
        ),
        (
            compressed("float-quantized", **FLOAT, inputs={**TOKENS, "type": "float"}),
            "float8 dynamic by token",
            True,
        ),
        (FP8, "float8 dynamic by token", True),
        ({**FP8, "activation_scheme": "static"}, "float8 static by tensor", True),
        ({**FP8, "weight_block_size": [128, 128]}, "float8 dynamic by group", True),
        (
            {**FP8, "weight_block_size": [128, 128], "activation_scheme": "static"},
            "float8 static by tensor",
            False,
        ),
        (
            compressed("float-quantized", GROUPED, **FLOAT, strategy="block", block_structure=[128, 128]),
            "float8 dynamic by group",
            True,
        ),
        (
            compressed(
                "float-quantized",
                {**GROUPED, "group_size": 64},
                **FLOAT,
                strategy="block",
                block_structure=[128, 128],
            ),
            "float8 dynamic by group",
            False,
        ),
        (GPTQ, "", False),
    ],
)
def test_how_inputs_are_quantized_is_kept(config: dict[str, Any], wanted: str, applied: bool) -> None:
    found = model_config({**VARIANTS[VARIANT], "quantization_config": config})
    assert found.quantized_inputs == wanted
    assert found.stored is not None and found.stored.inputs is applied


def test_inputs_are_quantized_where_a_product_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU: bytes, but not floats of eight bits, which a warning says."""
    write_quantized(tmp_path / "bytes", compressed("int-quantized", inputs=TOKENS), int8)
    layer = loaded(tmp_path / "bytes")["layers"][0]
    assert isinstance(layer["mlp"]["down"], Quantized) and layer["mlp"]["down"].inputs
    options = EngineConfig.of("MODEL", {"max_model_len": 64})
    with caplog.at_level("WARNING", "jengine"):
        spec = describe(options, read_config(tmp_path / "bytes"), make_mesh(1), tmp_path)
        assert not caplog.records and not spec.model.unquantized_inputs
        write_quantized(tmp_path / "floats", FP8, fp8("all"))
        spec = describe(options, read_config(tmp_path / "floats"), make_mesh(1), tmp_path)
    assert spec.model.unquantized_inputs == "float8 dynamic by token"
    assert "quantizes inputs of products (float8 dynamic by token), which no product here does" in caplog.text


def test_rows_have_scales_of_their_own_in_place_of_stored_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU bytes, and on Hopper and Ada floats; as with dynamic scales, and a warning says so."""
    write_quantized(tmp_path / "bytes", compressed("int-quantized", inputs=STATIC), int8)
    write_quantized(tmp_path / "floats", {**FP8, "activation_scheme": "static"}, fp8("all"))
    for name, device, inputs, other in (
        ("bytes", None, "int8", None),
        ("floats", "h100", "float8_e4m3fn", "fp8"),
        ("floats", "l4", "float8_e4m3fn", "fp8"),
        ("floats", "a100", None, None),
        ("floats", None, None, None),
    ):
        caplog.clear()
        options = EngineConfig(model=str(tmp_path / name), max_model_len=64)
        with caplog.at_level("WARNING", "jengine"):
            if device is None:
                spec = describe(options, read_config(tmp_path / name), make_mesh(1), tmp_path)
            else:
                spec = described(options, device_spec(device))
        down = spec.params["layers"][0]["mlp"]["down"]
        assert stored(down).format.inputs == inputs
        assert ("each row's scale comes from its numbers" in caplog.text) == (inputs is not None)
        assert ("which no product here does" in caplog.text) == (inputs is None)
        if other is not None:  # as this option quantizes a checkpoint that is not
            assert stored(down).format == QUANTIZATIONS[other].matrices


def test_products_of_a_checkpoint_are_those_of_the_option(tmp_path: Path) -> None:
    """Of bytes: the checkpoint's weights times rows of bytes with a scale each."""
    write_quantized(tmp_path, compressed("int-quantized", inputs=STATIC), int8)
    weight = loaded(tmp_path)["layers"][0]["mlp"]["down"]
    x = np.random.default_rng(0).normal(size=(5, weight.shape[-1])).astype(np.float32)
    rows = dequantize(quantize(x, "int8"))
    exact = np.asarray(rows, np.float64) @ np.asarray(dequantize(weight), np.float64).T
    np.testing.assert_allclose(product(x, weight), exact, atol=1e-5 * np.abs(exact).max())
