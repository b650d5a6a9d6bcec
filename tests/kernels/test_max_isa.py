"""XLA's flag for the newest instructions holds for the kernels too, and for all that depends on the
processor.
"""

from __future__ import annotations

import platform

import pytest

from jengine.execution import spec
from pallas_kernels.llvm import native
from pallas_kernels.llvm.formats import processor
from pallas_kernels.llvm.max_isa import hidden
from pallas_kernels.products import choice
from pallas_kernels.products.weight import form_key
from pallas_kernels.quantization.formats import WeightFormat

FEATURES = [
    "sse4.2", "avx", "avx2", "f16c", "fma", "bmi2", "avxvnni", "avx_vnni", "avx512f", "avx512vnni",
    "avx512_vnni", "avx512bf16", "avx512_bf16", "amx-int8", "amx_int8", "amx-fp16",
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ("", FEATURES),
        ("--xla_cpu_max_isa=AMX_FP16", FEATURES),
        ("--xla_cpu_max_isa=AMX", FEATURES[:-1]),
        ("--xla_cpu_max_isa=avx512_bf16 --xla_other=AVX", FEATURES[:-3]),
        ("--xla_cpu_max_isa=AVX512", [*FEATURES[:9]]),
        ("--xla_cpu_max_isa=AVX512 --xla_cpu_max_isa=AVX2", FEATURES[:6]),
        ("--xla_cpu_max_isa=SSE4_2", ["sse4.2", "bmi2"]),
    ],
)
def test_what_is_hidden(flags: str, left: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert [name for name in FEATURES if name not in hidden(FEATURES)] == left


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is of x86")
def test_kernels_and_the_names_of_programs_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are saved with the flag are not taken for others, nor are measurements."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    found = processor(native.host())
    if "+avx2" not in native.host().features.split(","):
        pytest.skip("this processor is older")
    assert (found.lanes, found.pairs, found.bytes, found.tiles) == (8, False, "madd", False)
    assert "+avx512" not in native.host().features
    features = spec.cpu_features.__wrapped__().split()
    assert "avx2" in features and not hidden(features)


def test_what_follows_no_flag_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA calls libraries that use what the processor has."""
    monkeypatch.setattr(choice, "_fastest", lambda *_: "xla")
    weight = WeightFormat("float32", 32)
    key = form_key(choice.MANY, "float32", weight.name)
    chosen = []
    for flags in ("", "--xla_cpu_max_isa=AVX2"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        chosen.append(choice.forms("float32", [weight], (64, 64), {})[key])
    assert chosen == ["xla", "kernel"]
