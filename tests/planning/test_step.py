"""Seconds of steps with layouts: by hand, and how they change with devices and load."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jengine.capacity.planning.links import Cluster
from jengine.capacity.planning.roofline import (
    CAUSES,
    Batch,
    Formats,
    Roofline,
    kv_token_bytes,
    most_met,
    most_routed,
)
from jengine.capacity.planning.traffic import Serving, Traffic
from jengine.checkpoints.hugging_face import model_config
from jengine.devices.device_spec import DeviceSpec, device_spec
from jengine.models import Model, build
from jengine.parallel.layout import Layout
from tests.golden.weights import VARIANTS
from tests.planning.test_roofline import llama

H200 = device_spec("h200")
# what steps reach of them
BANDWIDTH, RATE, LINK = 0.70 * 4.8e12, 0.64 * 989.5e12, 450e9
LAYERS, HEAD = 68_451_041_280, 1_050_673_152  # elements of the 70B


def formats(kv_bytes: float) -> Formats:
    return Formats(
        weight_bytes=2, product="bfloat16", dtype="bfloat16", activation_bytes=2, kv_bytes=kv_bytes
    )


@functools.cache
def costs_of_70b(layout: Layout) -> Roofline:
    model = llama("70b", layout.tensor)
    cluster = Cluster.of(H200, max(8, layout.devices))
    layers = (80 // layout.stages,) * layout.stages
    return Roofline(model, formats(kv_token_bytes(model, 2)), cluster, layout, layers)


@functools.cache
def mixtral(tensor: int) -> Model:
    config = model_config({**VARIANTS["mixtral"], "num_local_experts": 8})
    return build(config, "bfloat16", 4096, shards=tensor)


def with_experts(layout: Layout, device: DeviceSpec = H200, hosts: int = 1) -> Roofline:
    """Mixtral's shape: eight experts, of which a token uses two; four devices on each host."""
    model = mixtral(layout.tensor)
    layers = (model.config.num_layers // layout.stages,) * layout.stages
    cluster = Cluster.of(device, 4 * hosts, hosts)
    return Roofline(model, formats(kv_token_bytes(model, 2)), cluster, layout, layers)


def test_tensor_parallelism_by_hand() -> None:
    """512 rows of 100 tokens on eight devices: each part of a layer takes the longer of its two."""
    step = costs_of_70b(Layout(tensor=8)).step(Batch(512, 100))
    products = 2 * 512 * (LAYERS + HEAD) / 8 / RATE
    memory = 512 * 100 * 40_960 / BANDWIDTH  # keys and values of 70B on one of eight devices
    sums = 2 * 80 + 1  # two a layer and the embedding's
    size = 512 * 8192 * 2
    logits = 512 * 128_256 * 4 / 8
    assert step["products"] == pytest.approx(products) and step["memory"] == pytest.approx(memory)
    assert step["links"] == pytest.approx((sums * 2 * size + logits) * 7 / 8 / LINK)
    assert step["latency"] == pytest.approx(sums * 15e-6 + 10.8e-6)
    assert step["network"] == step["bubble"] == 0


def test_prompts_by_hand() -> None:
    """8192 tokens of prompts of 2048 on one device: 4 rows of logits, and a token sees 1024 on average."""
    step = costs_of_70b(Layout()).step(Batch(0, 0, 8192, 2048))
    attention = 4 * 8192 * 64 * 128 * 1024 * 80
    assert step["products"] == pytest.approx((2 * 8192 * LAYERS + attention) / RATE)
    assert step["memory"] == pytest.approx(2 * HEAD / BANDWIDTH), "4 rows use a head less than they read it"


def test_rows_of_logits_by_hand() -> None:
    """One of each sequence, and one of each prompt's end."""
    *_, (moved, operations, _) = costs_of_70b(Layout()).parts(Batch(3, 100, 8192, 2048), 1.0, 1.0)
    assert (moved, operations) == (2 * HEAD, 2 * 7 * HEAD)
    step = costs_of_70b(Layout(tensor=8)).step(Batch(0, 0, 4, 1))
    sums, size, logits = 2 * 80 + 1, 4 * 8192 * 2, 4 * 128_256 * 4 / 8
    assert step["links"] == pytest.approx((sums * size + logits / 8) * 7 / LINK), "each sum in one shot"


def test_stages_read_the_weights_once_for_each_cohort() -> None:
    """One sequence passes through all stages, which together have all layers. The last one has the head, too,
    so the others wait for it.
    """
    one, four = costs_of_70b(Layout()).step(Batch(1, 0)), costs_of_70b(Layout(stages=4)).step(Batch(1, 0))
    assert one["memory"] == pytest.approx(2 * (LAYERS + HEAD) / BANDWIDTH)
    assert four["memory"] == pytest.approx(one["memory"])
    sent = 8192 * 2 / LINK
    assert four["links"] == pytest.approx(3 * sent) and four["latency"] == pytest.approx(3 * 7.2e-6)
    assert four["bubble"] == pytest.approx(3 * (2 * HEAD / BANDWIDTH - sent - 7.2e-6))


def test_stages_serve_as_many_cohorts_as_there_are() -> None:
    """Where weights decide, four stages give each of four sequences a token in the time of one."""
    costs = costs_of_70b(Layout(stages=4))
    assert costs.seconds(Batch(4, 0)) == pytest.approx(costs.seconds(Batch(1, 0)))


def test_experts_over_devices_by_hand() -> None:
    """Whole experts on four data ranks: the busiest device decides. In parts, all have an equal share."""
    costs = with_experts(Layout(data=4, expert_parallel=True))
    elements, hidden, layers = costs.model.elements, costs.model.config.hidden_size, costs.expert_layers
    parts = [*costs.parts(Batch(3, 0), 1.0, 1.0)]
    assert parts[1][:2] == (
        most_met(8, 2, 4, 12) * elements.expert * 2,
        2 * most_routed(8, 2, 4, 12) * elements.expert,
    )
    step, size = costs.step(Batch(12, 0)), 3 * hidden * 2
    assert step["links"] == pytest.approx(2 * layers * 4 * size * 3 / 4 / LINK), "gathered, and summed"
    assert step["latency"] == pytest.approx(2 * layers * 8.4e-6)
    [_, (moved, operations, _), *_] = with_experts(Layout(tensor=4)).parts(Batch(12, 0), 1.0, 1.0)
    assert moved == pytest.approx(8 * (1 - 0.75**12) / 4 * elements.expert * 2)
    assert operations == 2 * 12 * 2 / 4 * elements.expert


LAYOUTS = [
    Layout(),
    Layout(tensor=4),
    Layout(stages=2, tensor=2),
    Layout(tensor=4, expert_parallel=True),
    Layout(data=2, tensor=2, expert_parallel=True),
    Layout(data=8, expert_parallel=True),
    Layout(stages=2, data=4, expert_parallel=True),
    Layout(tensor=8),
]


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    rows=st.integers(1, 300),
    tokens=st.integers(0, 3000),
    what=st.sampled_from(["bandwidth", "link", "network", "rates", "rows", "tokens", "context"]),
    times=st.floats(1.0, 10.0),
)
def test_more_is_never_slower_and_work_never_free(
    layout: Layout, rows: int, tokens: int, what: str, times: float
) -> None:
    """A faster device, link or network shortens a step or leaves it; more work lengthens it."""
    batch, device = Batch(rows, 500.0, tokens, 1000), H200
    before = with_experts(layout, hosts=2).seconds(batch)
    if what in ("rows", "tokens", "context"):
        more = batch._replace(**{what: getattr(batch, what) * times})
        assert with_experts(layout, hosts=2).seconds(more) >= before * (1 - 1e-9)
        return
    faster = (
        {name: rate * times for name, rate in device.rates.items()}
        if what == "rates"
        else getattr(device, what) * times
    )
    after = with_experts(layout, dataclasses.replace(device, **{what: faster}), hosts=2).step(batch)
    assert sum(after.values()) <= before * (1 + 1e-9) and all(after[cause] >= 0 for cause in CAUSES)


def test_the_most_sequences_within_targets() -> None:
    """Half of the time per token, and more of it with stages: prompts make the other cohorts wait."""
    costs = costs_of_70b(Layout(tensor=8))
    traffic = Traffic(prompt=1000, output=500, tpot_ms=25.0)
    serving = Serving(costs, traffic, fits=5000, budget=8192)
    best = serving.best
    assert best is not None and best.meets(traffic) and not serving.at(best.sequences + 1).meets(traffic)
    assert best.per_device == pytest.approx(best.sequences / best.tpot / 8)
    assert Serving(costs, dataclasses.replace(traffic, tpot_ms=1.0), 5000, 8192).best is None
    assert Serving(costs, traffic, 10, 8192).best == serving.at(10), "where no more fit"
    assert Serving(costs, dataclasses.replace(traffic, ttft_ms=60.0), 5000, 8192).best.ttft <= 0.06  # type: ignore[union-attr]
    step = serving.at(100)  # 200 tokens of prompts a step: one step in five has one of 1000
    decode, filled = serving.decode(100), costs.seconds(Batch(100, 1250, 1000, 1000))
    assert step.tpot == pytest.approx(0.8 * decode + 0.2 * filled)
