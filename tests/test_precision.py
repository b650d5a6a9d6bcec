"""The choice of number formats for a device."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import EngineConfig
from jengine.engine.setup import precision
from jengine.engine.setup.precision import check_formats, choose_dtype
from jengine.execution import kernels
from jengine.models.config import ModelConfig
from tests.golden.weights import VARIANTS

MODEL: ModelConfig = dataclasses.replace(model_config(VARIANTS["llama_gqa"]), dtype="bfloat16")


def gpu(capability: str) -> Any:
    return SimpleNamespace(platform="gpu", device_kind="NVIDIA Test", compute_capability=capability)


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bfloat16 products."""
    monkeypatch.setattr(precision, "cpu_features", lambda: "fpu sse2 avx2 fma")


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16", "bf16"])
def test_a_cpu_with_products_of_bfloat16_is_not_measured(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_product_seconds", lambda *_: pytest.fail("there is nothing to measure"))
    monkeypatch.setattr(precision, "cpu_features", lambda: f"fpu {flag} avx2")
    assert choose_dtype("auto", MODEL, jax.devices("cpu")[0], tmp_path) == "bfloat16"


@pytest.mark.parametrize("given", ["bfloat16", "float16", "float32"])
@pytest.mark.usefixtures("plain_cpu")
def test_a_given_dtype_is_taken_where_auto_would_warn_or_measure(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_product_seconds", lambda *_: pytest.fail("there is nothing to choose"))
    assert [
        choose_dtype(given, MODEL, device, tmp_path) for device in (gpu("7.5"), jax.devices("cpu")[0])
    ] == [given] * 2


def test_a_gpu_takes_the_checkpoints(tmp_path: Path) -> None:
    assert choose_dtype("auto", MODEL, gpu("8.0"), tmp_path) == "bfloat16"
    assert (
        choose_dtype("auto", dataclasses.replace(MODEL, dtype="float32"), gpu("7.5"), tmp_path) == "float32"
    )


def test_a_gpu_without_bfloat16_takes_float16_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="NVIDIA Test has no bfloat16"):
        assert choose_dtype("auto", MODEL, gpu("7.5"), tmp_path) == "float16"


def test_float32_on_a_cpu_is_not_narrowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_product_seconds", lambda *_: pytest.fail("there is nothing to measure"))
    assert (
        choose_dtype("auto", dataclasses.replace(MODEL, dtype="float32"), jax.devices("cpu")[0], tmp_path)
        == "float32"
    )


@pytest.mark.parametrize(("narrow", "chosen"), [(0.5, "bfloat16"), (0.9, "float32"), (3.0, "float32")])
@pytest.mark.usefixtures("plain_cpu")
def test_a_cpu_is_measured_once(
    narrow: float, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def seconds(_: ModelConfig, dtype: str, __: jax.Device) -> float:
        asked.append(dtype)
        return 1.0 if dtype == "float32" else narrow

    monkeypatch.setattr(precision, "_product_seconds", seconds)
    assert [choose_dtype("auto", MODEL, jax.devices("cpu")[0], tmp_path) for _ in range(3)] == [chosen] * 3
    assert asked == ["float32", "bfloat16"]
    (file,) = tmp_path.rglob("*.json")
    file.write_text("{")  # what cannot be read is measured again
    assert choose_dtype("auto", MODEL, jax.devices("cpu")[0], tmp_path) == chosen and len(asked) == 4
    assert json.loads(file.read_text())["dtype"] == chosen


@pytest.mark.usefixtures("plain_cpu")
def test_of_processes_that_measure_at_once_all_take_the_first_ones_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(root: Path, narrow: float, before: Callable[[], object]) -> str:
        def seconds(_: ModelConfig, dtype: str, __: jax.Device) -> float:
            if dtype == "float32":
                before()
            return 1.0 if dtype == "float32" else narrow

        monkeypatch.setattr(precision, "_product_seconds", seconds)
        return choose_dtype("auto", MODEL, jax.devices("cpu")[0], root)

    assert choose(tmp_path, 3.0, lambda: choose(tmp_path, 0.5, lambda: None)) == "bfloat16"


@pytest.mark.usefixtures("plain_cpu")
def test_a_real_measurement(tmp_path: Path) -> None:
    chosen = choose_dtype("auto", MODEL, jax.devices("cpu")[0], tmp_path)
    (file,) = tmp_path.rglob("*.json")
    seconds = json.loads(file.read_text())["product_seconds"]
    assert seconds.keys() == {"float32", "bfloat16"} and min(seconds.values()) > 0
    assert (chosen == "bfloat16") == (seconds["bfloat16"] < precision.CLEARLY * seconds["float32"])


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("quantization", SimpleNamespace(platform="cpu", device_kind="cpu")),
        ("kv_cache_dtype", SimpleNamespace(platform="cpu", device_kind="cpu")),
        ("quantization", gpu("8.0")),
        ("kv_cache_dtype", gpu("7.5")),
    ],
)
def test_emulated_fp8_is_said(name: str, device: Any) -> None:
    with pytest.warns(UserWarning, match=f"{name}='fp8' is emulated"):
        check_formats(EngineConfig.of("demo", {name: "fp8"}), device)


def test_what_is_native_is_not_warned_of() -> None:
    check_formats(EngineConfig(quantization="fp8", kv_cache_dtype="fp8"), gpu("8.9"))
    check_formats(EngineConfig(kv_cache_dtype="fp8"), gpu("8.0"))  # attention converts it in registers
    check_formats(EngineConfig(quantization="int8"), SimpleNamespace(platform="cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("features", "platform", "quantized", "said"),
    [
        ("avx2 fma", "cpu", "", "AVX2 only, the slower class of x86"),
        ("avx2 fma avx512f avx512_vnni avx512_bf16", "cpu", "", "AVX-512 and bfloat16 products"),
        ("avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8", "cpu", "", "AMX"),
        ("avx2 fma avx512f", "cpu", "", None),  # a class that was not measured
        ("avx2 fma", "cpu", "w8a8", None),
        ("avx2 fma", "gpu", "", None),
    ],
)
def test_the_fastest_quantization_is_said(
    features: str, platform: str, quantized: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "cpu_features", lambda: features)
    devices = np.array([SimpleNamespace(platform=platform)])
    spec: Any = SimpleNamespace(
        mesh=SimpleNamespace(devices=devices), model=SimpleNamespace(quantized=quantized)
    )
    advice = kernels.fastest_formats(spec)
    if said is None:
        assert advice == ""
    else:
        assert said in advice and "perplexity" in advice
        assert "quantization='w4a8'" in advice and "quantization='w8a8'" in advice
