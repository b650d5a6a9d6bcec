"""Memory of layouts: put together from the parts of an engine with tensor parallelism alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.capacity.layouts.memory import LayoutMemory, TensorGroup, memory_of
from jengine.core.config import EngineConfig
from jengine.devices.device_spec import device_spec
from jengine.parallel.layout import Layout

DATA = Path(__file__).parent.parent / "data"
SOME = LayoutMemory(
    limit=1000, weights=300, experts=200, temporaries=100, gathered=10, slots=10, margin=20, page=7, data=2
)


def test_stages_of_70b_by_hand() -> None:
    """On four devices, two bytes of 68,451,041,280 elements and of two vocabularies are divided; norms are
    not. Of 80 layers, the largest of four stages has 21, and the first and last one vocabulary each.
    """
    config = EngineConfig(model=str(DATA / "llama-3.1-70b"), max_model_len=8192)
    group = TensorGroup.of(config, 4, device_spec("h200"))
    layers, vocabulary, norms = 2 * 68_451_041_280 // 4, 2 * 128_256 * 8192 // 4, 2 * 161 * 8192
    assert group.experts == 0 and group.vocabulary == (vocabulary, vocabulary)
    whole, stage = (
        memory_of(group, Layout(len(layers), 1, 4), layers, group, 256)
        for layers in ((80,), (20, 21, 20, 19))
    )
    assert whole.weights == layers + norms + 2 * vocabulary == group.memory.weights
    assert stage.weights == -(-(layers + norms) * 21 // 80) + vocabulary
    assert (whole.page, stage.page) == (64 * 327_680 // 4, 64 * 327_680 // 4 * 21 // 80)
    assert whole.temporaries == stage.temporaries and whole.gathered == 0
    assert str(whole).startswith("weights 32.9, margin 2.5, ") and str(whole).endswith(" of 126.9 GiB")


def test_free_memory_holds_pages_of_each_rank() -> None:
    assert SOME.free == 360 and SOME.pages == 51 and SOME.sequences(10) == 10
    assert dataclasses.replace(SOME, limit=600).sequences(1) == 0, "nothing is left"


@given(
    more=st.integers(0, 10**6), pages=st.integers(1, 50), part=st.sampled_from(["weights", "experts", "page"])
)
def test_more_memory_never_holds_fewer_sequences(more: int, pages: int, part: str) -> None:
    assert dataclasses.replace(SOME, limit=SOME.limit + more).sequences(pages) >= SOME.sequences(pages)
    larger = dataclasses.replace(SOME, **{part: getattr(SOME, part) + more})
    assert larger.sequences(pages) <= SOME.sequences(pages)


def test_padded_experts_take_memory() -> None:
    """128 experts on three devices: each has 43, as if there were 129."""
    config = EngineConfig(model=str(DATA / "gpt-oss-120b"), max_model_len=8192)
    three = TensorGroup.of(config, 3, device_spec("h200"))
    layout = Layout(tensor=3, expert_parallel=True)
    assert memory_of(three, layout, (36,), three, 256).experts == pytest.approx(
        three.experts * 129 / 128, abs=1
    )
