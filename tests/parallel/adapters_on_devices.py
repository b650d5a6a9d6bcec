"""Adapters on several devices. test_many_devices.py runs this as it runs many_devices.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from jengine.core.config import EngineConfig
from jengine.engine.start import start_engine
from tests.engine.loras import TARGETS, load
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.engine.test_lora import LORA, check_goldens
from tests.golden.loras import SETTINGS, VARIANTS_WITH_LORA, lora
from tests.golden.weights import max_model_len, write_model


@pytest.mark.parametrize(
    ("variant", "devices"),
    [
        ("llama_gqa", 2),  # whose kv heads the devices divide; four devices repeat them
        ("qwen3_moe", 2),
        *(
            pytest.param(variant, devices, marks=pytest.mark.full)
            for variant in VARIANTS_WITH_LORA
            for devices in (2, 4)
        ),
    ],
)
def test_adapters_are_sharded_as_the_weights_that_they_change(
    variant: str, devices: int, tmp_path: Path
) -> None:
    write_model(tmp_path, variant)
    options = {**SMALL, **LORA, **TARGETS.get(variant, {})}
    options |= {"tensor_parallel_size": devices, "dtype": "float32"}
    config = EngineConfig.of(str(tmp_path), {"max_model_len": max_model_len(variant), **options})
    with on_demand():
        engine, _ = start_engine(config, progress=False)
    for name in SETTINGS:
        load(engine, name, lora(variant, name))
    check_goldens(engine, variant)
