"""Which kernels serve a model on each generation of GPUs, which models attention's kernels cannot serve, and
the tables that these get.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import pytest

from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import EngineConfig
from jengine.engine.setup.shapes import describe
from jengine.execution.kernels import decode_refused, implementations
from jengine.execution.kernels import described as kernels_described
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.mesh import make_mesh
from pallas_kernels.compilation import ahead_of_time
from tests.extras import compiler_for_gpus
from tests.golden.weights import VARIANTS

SMALL = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 8, "dtype": "bfloat16"}
LLAMA = {**VARIANTS["llama_gqa"], **SMALL}
BLOOM = {**VARIANTS["bloom"], "hidden_size": 384, "dtype": "bfloat16"}
GEMMA4 = {**VARIANTS["gemma4_text"], "dtype": "bfloat16"}


@pytest.fixture
def h200() -> Any:
    compiler_for_gpus()
    return ahead_of_time.devices("h200", 1)


def described(devices: Any, model: dict[str, Any], **options: Any) -> ExecutionSpec:
    small = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 72, "page_size": 16}
    config = EngineConfig.of("MODEL", {**small, **options})
    return describe(config, model_config(model), make_mesh(1, devices), Path())


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (LLAMA, {"dtype": "float32"}, "dtype=float32: the kernel takes bfloat16 and float16"),
        (BLOOM, {}, "slopes: the kernel has no ALiBi"),
        # heads of two sizes
        (GEMMA4, {}, "head_dim=32: the kernel takes 64, 128, 256"),
        (GEMMA4, {"kv_cache_dtype": "int8"}, "head_dim=32: the kernel takes 64, 128, 256"),
    ],
)
def test_without_a_kernel_tables_have_buckets_of_pages(
    h200: Any, model: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    """Before there is a number of pages."""
    spec = described(h200, model, **options)
    assert decode_refused(spec) == reason and spec.table.page_buckets == (16,)
    assert spec.table.paged_rows


def test_with_kernels_rows_have_none(h200: Any) -> None:
    spec = described(h200, LLAMA)
    assert decode_refused(spec) is None and spec.table.page_buckets == (0,)


CAPABILITIES = {
    "8.0": "major: 8",
    "8.6": "major: 8 minor: 6",
    "8.7": "major: 8 minor: 7",
    "8.9": "major: 8 minor: 9",
    "9.0": "major: 9 feature_extension: ACCELERATED_FEATURES",
    "10.0": "major: 10 feature_extension: ACCELERATED_FEATURES",
    "10.3": "major: 10 minor: 3 feature_extension: ACCELERATED_FEATURES",
    "12.0": "major: 12 feature_extension: ACCELERATED_FEATURES",
}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_a_start_says_of_each_generation(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that a start logs, for experts and dense products in 8 bits with quantized inputs."""
    compiler_for_gpus()
    text = re.sub(
        r"(cuda_compute_capability) \{.*\}",
        rf"\1 {{ {CAPABILITIES[capability]} }}",
        ahead_of_time.description("h200"),
    ).replace("NVIDIA H200", f"GPU {capability}")
    monkeypatch.setattr(ahead_of_time, "description", lambda target: text)
    devices = ahead_of_time.devices("h200", 1)
    assert devices[0].compute_capability == capability
    model = {**VARIANTS["mixtral"], **SMALL, "intermediate_size": 128, "vocab_size": 128}
    said = kernels_described(implementations(described(devices, model, quantization="w8a8")))
    attention, caches = "decode attention, prefill attention, KV writes", "page copies"
    products = "products of w8a8, row quantization, products of experts in w8a8"
    if capability == "9.0":
        assert said == f"Hopper for {attention}, {caches}, {products}; XLA for products of bfloat16"
    else:
        why = f"device=GPU {capability}: the kernel is for GPUs of compute capability 9.0"
        dense, rows, experts = products.split(", ")
        refused = f"XLA (inputs=int8: XLA multiplies these without converting them) for {dense}"
        by_xla = f"{refused}; XLA ({why}) for {rows}; XLA for products of bfloat16"
        by_ampere = f"{attention}, {caches}, {experts}"
        if capability == "10.0" and jax.__version_info__ >= (0, 12):
            prompts = "Blackwell for prefill attention"
            by_ampere = by_ampere.replace(", prefill attention", "").replace(f", {experts}", "")
            few = "Ampere (rows=1: up to 8 of a matrix cost mma.sync as few instructions)"
            own = f"Ampere ({why}) for {by_ampere}; {prompts}"
            plain = "XLA for products of bfloat16"
            assert said == f"{own}; {by_xla.removesuffix(plain)}{few} for {experts}; {plain}"
        else:
            assert said == f"Ampere ({why}) for {by_ampere}; {by_xla}"
