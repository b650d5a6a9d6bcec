"""Whole experts over the devices. test_many_devices.py runs this as it runs many_devices.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from jengine.core.config import EngineConfig
from jengine.engine.start import start_engine
from jengine.execution.programs import Programs
from jengine.models.moe import Experts
from tests.engine.invariance import OPTIONS, check_invariance
from tests.engine.loras import TARGETS, load
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.engine.test_golden import assert_equal
from tests.engine.test_lora import LORA, check_goldens
from tests.execution.specs import make_spec, temporaries_bound
from tests.golden.loras import SETTINGS, lora
from tests.golden.weights import Golden, max_model_len, write_model
from tests.models.test_golden import TOLERANCE, differences
from tests.parallel.many_devices import answers, collectives, in_loops

FAMILIES = [
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gemma4_text", "glm4_moe", "gpt_oss", "granitemoe",
    "llama4_text", "minimax_m1", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text",
    "qwen3_moe_mixed", "qwen3_next",
]  # fmt: skip
PARALLEL = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("variant", "devices"),
    [
        ("gpt_oss", 3),  # devices that do not divide the experts, which have biases
        ("deepseek_v3", 8),
        *(
            pytest.param(variant, devices, marks=pytest.mark.full)
            for variant in FAMILIES
            for devices in (2, 3, 4, 8)
        ),
    ],
)
def test_logits(variant: str, devices: int, tmp_path: Path) -> None:
    assert max(differences(variant, tmp_path, devices, expert_parallel=True)) < TOLERANCE


@pytest.mark.parametrize("variant", ["gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.full)])
def test_the_form_of_gpus(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in the order of experts, of which other devices have most."""
    monkeypatch.setattr(Experts, "by_block", Experts.by_group)
    assert max(differences(variant, tmp_path, 3, expert_parallel=True)) < TOLERANCE


@pytest.mark.parametrize(
    ("variant", "devices"),
    [
        *(
            pytest.param(variant, devices, marks=pytest.mark.full)
            for variant in ("deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_moe_mixed")
            for devices in (2, 4, 8)
        ),
    ],
)
def test_tokens(variant: str, devices: int, tmp_path: Path) -> None:
    write_model(tmp_path, variant)
    for answer, case in zip(
        answers(tmp_path, variant, devices, **PARALLEL), Golden.read(variant).cases, strict=False
    ):
        assert_equal(answer, case)


@pytest.mark.full
def test_eight_bit_experts_are_those_of_one_device(tmp_path: Path) -> None:
    """With four bits, tensor parallelism cuts groups of attention's weights in another way; see ranks."""
    write_model(tmp_path, "qwen3_moe")
    one, many = (
        answers(tmp_path, "qwen3_moe", devices, quantization="int8", **how)
        for devices, how in ((1, {}), (4, PARALLEL))
    )
    assert [answer.tokens for answer in many] == [answer.tokens for answer in one]


@pytest.mark.full
@pytest.mark.parametrize(("variant", "devices"), [("qwen3_moe", 2), ("qwen3_moe", 8), ("mixtral", 3)])
def test_adapters_of_experts(variant: str, devices: int, tmp_path: Path) -> None:
    write_model(tmp_path, variant)
    options = {**SMALL, **LORA, **TARGETS[variant], **PARALLEL, "max_model_len": max_model_len(variant)}
    options |= {"tensor_parallel_size": devices, "dtype": "float32"}
    with on_demand():
        engine, _ = start_engine(EngineConfig.of(str(tmp_path), options), progress=False)
    for name in SETTINGS:
        load(engine, name, lora(variant, name))
    check_goldens(engine, variant)


@pytest.mark.full
@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_batch_invariance(variant: str, devices: int, tmp_path: Path) -> None:
    write_model(tmp_path, variant)
    options = {**SMALL, **OPTIONS, **PARALLEL, "max_model_len": 192, "dtype": "bfloat16"}
    options["tensor_parallel_size"] = devices
    with on_demand(optimized=True):
        engine, _ = start_engine(EngineConfig.of(str(tmp_path), options), progress=False)
    check_invariance(engine, 50, seed=3)


@pytest.mark.parametrize(
    ("variant", "devices"),
    [
        ("qwen3_moe", 4),
        *(pytest.param(variant, 3, marks=pytest.mark.full) for variant in ("gpt_oss", "deepseek_v3")),
    ],
)
def test_a_trunk_sums_as_without(variant: str, devices: int) -> None:
    spec = make_spec(variant, devices=devices, expert_parallel=True)
    key = spec.table.trunks()[0]
    compiled = Programs(spec, None, threads=2, progress=False, first=[key])
    assert collectives(compiled[key]) == {"all-reduce": 2 * spec.model.config.num_layers + 1}
    assert not in_loops(compiled[key])
    assert compiled.memory[key].temporaries <= temporaries_bound(spec, key)
