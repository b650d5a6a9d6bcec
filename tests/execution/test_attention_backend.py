"""The option attention_backend: what it is refused with, and what trunks call with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jengine import InvalidArgument
from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import EngineConfig
from jengine.engine.shapes import describe
from jengine.execution.kernels import prepare
from jengine.execution.programs import lower
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.mesh import make_mesh
from jengine.table.program_table import TrunkKey
from pallas_kernels import ahead_of_time, fastest
from pallas_kernels.flashinfer import build
from tests.extras import compiler_for_gpus
from tests.golden.weights import VARIANTS

SMALL = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 8, "dtype": "bfloat16"}
LLAMA = {**VARIANTS["llama_gqa"], **SMALL}


def described(
    backend: str, model: dict[str, Any] = LLAMA, devices: Any = None, **options: Any
) -> ExecutionSpec:
    small = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 72, "page_size": 16}
    config = EngineConfig.of("MODEL", {**small, "attention_backend": backend, **options})
    return describe(config, model_config(model), make_mesh(1, devices), Path())


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("triton", "must be one of auto, mosaic, flashinfer"),
        ("flashinfer", "device=cpu: FlashInfer's kernel is for GPUs of compute capability 9.0"),
        ("mosaic", "a CPU has other kernels"),
    ],
)
def test_on_a_cpu_it_is_refused(backend: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"attention_backend='{backend}': {reason}"):
        described(backend)


def test_it_is_part_of_a_programs_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = described("auto")
    before = spec.identity()
    assert before["attention_backend"] == "auto" and before["flashinfer"] == ""
    monkeypatch.setattr(build, "installed_version", lambda: "0.7.2")
    monkeypatch.setattr("jengine.execution.spec.flashinfer_version", lambda: "0.7.2")
    assert spec.identity() == before  # where it is not faster, it does not matter whether it is there
    case = fastest.Case("bfloat16", 8, 2, 16, 64, 8)
    table = fastest.updated(
        {}, spec.mesh.devices.flat[0].device_kind, case, {"mosaic": 2.0, "flashinfer": 1.0}
    )
    monkeypatch.setattr(fastest, "table", lambda: table)
    assert spec.identity()["flashinfer"] == "0.7.2"


@pytest.fixture
def h200() -> Any:
    compiler_for_gpus()
    return ahead_of_time.devices("h200", 1)


def test_what_it_cannot_serve_is_refused_by_name(h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "why_not_built", lambda kernel: None)
    gemma = {**VARIANTS["gemma2"], "head_dim": 64, "dtype": "bfloat16"}
    bloom = {**VARIANTS["bloom"], "hidden_size": 384, "dtype": "bfloat16"}
    latent = {**VARIANTS["deepseek_v2"], "dtype": "bfloat16"}
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (LLAMA, {"kv_cache_dtype": "int8"}, "k_pages=quantized"),
        (LLAMA, {"page_size": 256}, "page_size=256"),
        (LLAMA, {"dtype": "float32"}, "dtype=float32"),
        (gemma, {}, "soft_cap="),
        (latent, {}, "deepseek_v2 has latent attention"),
        (bloom, {}, "slopes: FlashInfer's kernel has no ALiBi"),
    ]
    for model, options, reason in refused:
        with pytest.raises(InvalidArgument, match=f"attention_backend='flashinfer': {reason}"):
            described("flashinfer", model, h200, **options)
    with pytest.raises(InvalidArgument, match="attention_backend='mosaic': dtype=float32"):
        described("mosaic", LLAMA, h200, dtype="float32")
    with pytest.raises(InvalidArgument, match="attention_backend='mosaic': slopes: the kernel has no ALiBi"):
        described("mosaic", bloom, h200)
    assert described("auto", bloom, h200).table.page_buckets == (16,)


def test_decode_rows_call_it_and_programs_are_prepared(h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[build.Kernel] = []
    monkeypatch.setattr(build, "why_not_built", lambda kernel: None)
    monkeypatch.setattr(build, "register", lambda kernel: made.append(kernel) or "xqa")
    spec = described("flashinfer", LLAMA, h200)
    prepare(spec)
    [kernel] = made
    assert (kernel.page_size, kernel.head_dim, kernel.windowed) == (16, 64, False)
    trunk = lower(spec, TrunkKey(8, 0)).as_text()
    assert trunk.count("custom_call @xqa(") == 1  # one function, which all layers call
    assert set(made) == {kernel}
    assert "custom_call @xqa(" not in lower(described("mosaic", LLAMA, h200), TrunkKey(8, 0)).as_text()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_heads_of_two_sizes_are_described_for_a_gpu(kv_cache_dtype: str, h200: Any) -> None:
    """Before there is a number of pages. Kernels have no heads of 16."""
    spec = described(
        "auto", {**VARIANTS["gemma4_text"], "dtype": "bfloat16"}, h200, kv_cache_dtype=kv_cache_dtype
    )
    assert spec.table.page_buckets == (16,)
