"""The plan's arithmetic compared with figures calculated by hand, and with the parameters that models
declare.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import pytest

from jengine.capacity.planning.links import Cluster
from jengine.capacity.planning.roofline import (
    Batch,
    Formats,
    Roofline,
    experts_met,
    kv_token_bytes,
    mean_seen,
    seen,
)
from jengine.checkpoints import read_config
from jengine.checkpoints.hugging_face import model_config
from jengine.devices.device_spec import DeviceSpec, device_spec
from jengine.models import Model, build
from jengine.models.config import ModelConfig
from pallas_kernels.compilation.ahead_of_time import targets
from tests.golden.weights import VARIANTS

DATA = Path(__file__).parent.parent / "data"
BF16 = Formats(weight_bytes=2, product="bfloat16", dtype="bfloat16", activation_bytes=2, kv_bytes=131_072)


def llama(size: str, devices: int = 1) -> Model:
    return build(read_config(DATA / f"llama-3.1-{size}"), "bfloat16", 8192, shards=devices)


@pytest.mark.parametrize(
    ("size", "parameters", "layers", "head", "norms"),
    [  # layers: 32 x (80 x 128 x 4096 + 3 x 4096 x 14336), and 80 x (144 x 128 x 8192 + 3 x 8192 x 28672)
        ("8b", 8_030_261_248, 6_979_321_856, 525_336_576, 65 * 4096),
        ("70b", 70_553_706_496, 68_451_041_280, 1_050_673_152, 161 * 8192),
    ],
)
def test_llamas_parameters(size: str, parameters: int, layers: int, head: int, norms: int) -> None:
    model = llama(size)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(model.params)) == parameters
    elements = model.elements
    assert (elements.layers, elements.experts, elements.head, elements.tables) == (layers, 0, head, head)
    assert layers + 2 * head + norms == parameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_familys_matrices_are_counted(variant: str) -> None:
    """Counts the checkpoint's tensors with two or more axes as matrices, except positions, biases and norms.
    On two devices, padding and copies do not count.
    """
    config = model_config(VARIANTS[variant])
    one, two = (build(config, "float32", 64, shards=shards) for shards in (1, 2))
    tensors = {
        piece.name: piece.shape
        for sources in jax.tree.leaves(one.sources, is_leaf=is_source)
        for piece in sources
    }
    others = "bias", "norm", "wpe", "embed_positions"
    matrices = [
        shape
        for name, shape in tensors.items()
        if len(shape) > 1 and not any(other in name for other in others)
    ]
    counts = one.elements
    total = counts.layers + counts.experts * counts.expert + counts.head + counts.tables
    assert total == sum(map(math.prod, matrices))
    assert counts == two.elements


def is_source(leaf: object) -> bool:
    return isinstance(leaf, tuple)


def test_a_tokens_keys_and_values() -> None:
    """8B: 2 x 32 layers x 8 heads x 128 x 2 bytes. 70B: 2 x 80 x 8 x 128 x 2, of which each of eight devices
    has one head.
    """
    assert kv_token_bytes(llama("8b"), 2) == 131_072
    assert kv_token_bytes(llama("70b"), 2) == 327_680
    assert kv_token_bytes(llama("70b", devices=8), 2) == 40_960
    assert kv_token_bytes(llama("70b", devices=16), 2) == 40_960, "a head is not divided"


def test_eight_bit_products_take_their_own_rate() -> None:
    """Attention does not."""
    sheet = DeviceSpec("D", "9.0", 1, 1e30, {"bfloat16": 100.0, "int8": 200.0}, 1.0, "link", 1)
    cluster = Cluster.of(dataclasses.replace(sheet, bandwidth_share=1.0, products_share=1.0), 1)
    model = llama("8b")
    products, attention = 2 * 7_504_658_432, 4 * 32 * 128 * 1000 * 32  # of a row that attends to 1000 tokens

    def seconds(product: str) -> float:
        formats = dataclasses.replace(BF16, product=product)
        return Roofline(model, formats, cluster).seconds(Batch(1, 1000))

    assert seconds("bfloat16") == pytest.approx((products + attention) / 100)
    assert seconds("int8") == pytest.approx(products / 200 + attention / 100)
    assert seconds("float8_e4m3fn") == seconds("bfloat16"), "emulated where the device has no such products"


SUITES = {"h200": "gpu_suite.json", "h100": "gpu_suite_h100.json"}


@pytest.mark.parametrize("target", SUITES)
def test_shares_give_the_steps_that_were_measured(target: str) -> None:
    """Decode and prefill of an 8B in bfloat16. The data sheet alone would give two thirds of the seconds."""
    device = device_spec(target)
    file = Path(__file__).parent.parent.parent / device.measured
    assert file.name == SUITES[target]
    roofline, checked = Roofline(llama("8b"), BF16, Cluster.of(device, 1)), 0
    for row in json.loads(file.read_text())["engine"]["rows"]:
        numbers = [int(number) for number in re.findall(r"\d+", row["case"])]
        if row["case"].startswith("decode"):
            batch = Batch(*numbers)
        elif row["case"].startswith("prefill"):
            batch = Batch(0, 0, numbers[0] * numbers[1], numbers[1])
        else:
            continue
        checked += 1
        assert roofline.seconds(batch) == pytest.approx(row["ms"] / 1e3, rel=0.04), row["case"]
    assert checked == 5


def test_devices_without_a_measurement_take_the_lowest_shares() -> None:
    measured = [device_spec(target) for target in SUITES]
    other = device_spec("a100")
    assert not other.measured
    assert other.bandwidth_share == min(device.bandwidth_share for device in measured)
    assert other.products_share == min(device.products_share for device in measured)


def test_windows_bound_what_is_seen() -> None:
    """Two layers, one with a window of 4."""
    config = ModelConfig(
        family="mistral", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=1,
        num_kv_heads=1, head_dim=8,
        max_position=99, windows=(4, None),
    )  # fmt: skip
    model = build(config, "float32", 8)
    assert seen(model, 3) == {0: 3, 1: 3} and seen(model, 10) == {0: 4, 1: 10}
    assert mean_seen(model, 4) == {0: 2, 1: 2} and mean_seen(model, 8) == {0: 4 - 16 / 16, 1: 4}


def test_experts_that_are_met() -> None:
    """Two of eight: one token meets two, two tokens 8 x (1 - 9/16), and many meet all."""
    model = build(model_config(VARIANTS["mixtral"]), "float32", 8)
    experts, each = model.elements.experts, model.elements.experts_per_token
    assert (experts, each) == (4, 2)
    assert experts_met(model, 1) == pytest.approx(each)
    assert experts_met(model, 2) == pytest.approx(experts * (1 - (1 - each / experts) ** 2))
    assert experts_met(model, 10_000) == pytest.approx(experts)
    assert experts_met(llama("8b"), 5) == 0


@pytest.mark.parametrize("target", targets())
def test_every_target_has_all_facts(target: str) -> None:
    facts = device_spec(target)
    assert facts.name.startswith("NVIDIA ") and target.upper() in facts.name.replace(" ", "")
    assert (
        2e10 < facts.memory < 2e11
        and 2e11 < facts.bandwidth < 1e13
        and 1e10 < facts.link < 1e12
        and facts.link_name
    )
    times = 4 if "GeForce" in facts.name else 2  # sums in float32 have half the rate there
    assert (
        facts.rates["int8"] == pytest.approx(times * facts.rates["bfloat16"], rel=0.01)
        and facts.rates["float16"] == facts.rates["bfloat16"]
    )


def test_other_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target='tpu': must be one of .*h100"):
        device_spec("tpu")
