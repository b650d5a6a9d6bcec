"""Memory of layouts: put together from the parts of an engine with tensor parallelism alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jengine.capacity.planning.layouts import Candidate, choose
from jengine.capacity.planning.links import Cluster
from jengine.capacity.planning.memory import TensorGroup, layout_memory, listed
from jengine.capacity.planning.traffic import Traffic
from jengine.core.config import EngineConfig
from jengine.devices.device_spec import device_spec
from jengine.parallel.layout import Layout

DATA = Path(__file__).parent.parent / "data"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_stages_of_70b_by_hand() -> None:
    """On four devices, two bytes of 68,451,041,280 elements and of two vocabularies are divided; norms are
    not. Of 80 layers, the largest of four stages has 21, and the first and last one vocabulary each.
    """
    config = EngineConfig(model=str(DATA / "llama-3.1-70b"), max_model_len=8192)
    group = TensorGroup.of(config, 4, device_spec("h200"))
    layers, vocabulary, norms = 2 * 68_451_041_280 // 4, 2 * 128_256 * 8192 // 4, 2 * 161 * 8192
    assert group.experts == 0 and group.vocabulary == (vocabulary, vocabulary)
    whole, stage = (
        layout_memory(group, Layout(len(layers), 1, 4), layers, group, 256)
        for layers in ((80,), (20, 21, 20, 19))
    )
    assert whole.weights == layers + norms + 2 * vocabulary == group.memory.weights
    assert stage.weights == -(-(layers + norms) * 21 // 80) + vocabulary
    assert (whole.page, stage.page) == (64 * 327_680 // 4, 64 * 327_680 // 4 * 21 // 80)
    assert whole == group.memory and whole.working == stage.working
    assert listed(whole).startswith("weights 32.9, margin 2.5, ") and listed(whole).endswith(" of 126.9 GiB")


def test_padded_experts_take_memory() -> None:
    """128 experts on three devices: each has 43, as if there were 129, and as the engine has them."""
    config = EngineConfig(model=str(DATA / "gpt-oss-120b"), max_model_len=8192, enable_expert_parallel=True)
    whole, three = (TensorGroup.of(config, count, device_spec("h200")) for count in (1, 3))
    layout = Layout(tensor=3, expert_parallel=True)
    memory = layout_memory(three, layout, (36,), whole, 256)
    assert three.experts == pytest.approx(whole.experts * 43 / 128, abs=1)
    assert memory == dataclasses.replace(three.memory, weights=pytest.approx(three.memory.weights, abs=1))


def test_whole_experts_keep_their_quantization(tmp_path: Path) -> None:
    """An eighth of an expert's 768 inputs is 96: three quarters of a group of 128. Whole experts have all."""
    fields = json.loads((DATA / "qwen3-30b-a3b" / "config.json").read_text())

    def candidates(**quantized: Any) -> dict[Layout, Candidate]:
        (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": quantized}))
        config = EngineConfig(model=str(tmp_path), max_model_len=8192)
        choice = choose(config, Cluster.of(device_spec("h200"), 8), Traffic(prompt=1024, output=256))
        return {one.deployment.layout: one for one in choice.candidates if one.deployment.replicas == 1}

    numbers = 48 * 128 // 8 * 3 * 768 * 2048  # of each device's experts, in half a byte or a byte, and scales
    for bits, quantized in ((4.125, GPTQ), (8.25, FP8)):
        found = candidates(**quantized)
        assert (Layout(tensor=8) in found) is (bits > 8)
        for data, tensor in ((8, 1), (2, 4), (1, 8)):
            candidate = found[Layout(data=data, tensor=tensor, expert_parallel=True)]
            assert numbers * bits / 8 < candidate.memory.weights < numbers * bits / 8 + (4 << 30) / tensor
