"""Memory of layouts: put together from the parts of an engine with tensor parallelism alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from jengine.capacity.planning.memory import TensorGroup, layout_memory, listed
from jengine.core.config import EngineConfig
from jengine.devices.device_spec import device_spec
from jengine.parallel.layout import Layout

DATA = Path(__file__).parent.parent / "data"


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
    """128 experts on three devices: each has 43, as if there were 129."""
    config = EngineConfig(model=str(DATA / "gpt-oss-120b"), max_model_len=8192)
    three = TensorGroup.of(config, 3, device_spec("h200"))
    layout = Layout(tensor=3, expert_parallel=True)
    weights = layout_memory(three, layout, (36,), three, 256).weights
    assert weights - three.memory.weights == pytest.approx(three.experts / 128, abs=1)
