"""Kernels for processors that lack what this one has: the instructions in them, and, where they run here,
their results.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.llvm import calls, native
from pallas_kernels.llvm.formats import processor
from pallas_kernels.llvm.kinds import INPUTS, WEIGHTS
from pallas_kernels.products.cpu import multiply, products
from pallas_kernels.products.weights import product
from pallas_kernels.quantization.quantized import quantize

AVX2 = "+sse2,+avx,+avx2,+fma,+f16c"
AVX512 = AVX2 + ",+avx512f,+avx512bw,+avx512vl,+avx512dq"
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
# features; instructions of plain and of eight-bit products; what must not occur
SETS = {
    "sse2": (X86, "+sse2", "mulps", "pmull|pmul", r"%[yz]mm|\bv[a-z]"),
    "avx2": (X86, AVX2, "vfmadd", "vpmaddwd", r"%zmm|vpdp|vdpbf"),
    "avxvnni": (X86, AVX2 + ",+avxvnni", "vfmadd", "vpdpbusd", r"%zmm|vdpbf"),
    "avx512": (X86, AVX512, "vfmadd.*zmm", "vpmaddwd.*zmm", r"vpdp|vdpbf"),
    "avx512bf16": (X86, AVX512 + ",+avx512bf16,+avx512vnni", "vdpbf16ps.*zmm", "vpdpbusd.*zmm", "tdpb"),
    "neon": (ARM, "+neon", "fmla", "mla|smlal", r"bfdot|sdot|smmla"),
    "armv8.6": (ARM, "+neon,+bf16,+dotprod,+fullfp16", "bfdot", "sdot", r"\bz[0-9]+\."),
}


@pytest.mark.parametrize("name", SETS)
def test_no_instruction_is_compiled_that_a_processor_lacks(name: str) -> None:
    triple, features, plain, of_bytes, lacking = SETS[name]
    target = native.Target(triple, features=features)
    texts = [
        native.assembly(multiply.product_module(target, "bfloat16", weight), target)
        for weight in ("bfloat16", "float8_e4m3fn")
    ]
    texts.append(native.assembly(multiply.bytes_module(target, "float32"), target))
    assert re.search(plain, texts[0]) and re.search(of_bytes, texts[2])
    for text in texts:
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith((".", "#", "//")))
        assert not re.search(lacking, code)


def runs_here(target: native.Target) -> bool:
    host = native.host()
    wanted = {feature for feature in target.features.split(",") if feature}
    return host.architecture == target.architecture and wanted <= set(host.features.split(","))


PAIRS = [*((x, weight) for x in INPUTS for weight in WEIGHTS), ("bfloat16", "w8a8")]
# a set with all pairs, and pairs with all sets; the rest are long tests
FEW = "avx2", ("float32", "float32"), ("bfloat16", "w8a8")
COMBINATIONS = [
    pytest.param(name, *pair, marks=[] if name in FEW or pair in FEW else pytest.mark.full)
    for name, (triple, *_) in SETS.items()
    if triple == X86
    for pair in PAIRS
]


@pytest.mark.parametrize(("name", "x_dtype", "kind"), COMBINATIONS)
def test_results_without_features(
    name: str, x_dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    triple, features, *_ = SETS[name]
    target = native.Target(triple, features=features)
    if not runs_here(target):
        pytest.skip(f"this processor lacks {name}")
    monkeypatch.setattr(native, "host", lambda: target)
    monkeypatch.setattr(products, "register", lambda known, make: calls.register(f"{known}_{name}", make))
    for rows, size, outs in ((1, 77, 9), (9, 130, 37)):
        x = jax.random.normal(jax.random.key(0), (rows, size)).astype(x_dtype)
        weight: Any = jax.random.normal(jax.random.key(1), (outs, size))
        stored = {"w8a8": "int8"}.get(kind, kind)
        weight = (
            quantize(weight, stored, inputs=kind == "w8a8") if kind not in INPUTS else weight.astype(kind)
        )
        run = jax.jit(lambda x, weight: product(x, weight, jnp.float32))
        lowered = run.lower(x, weight)
        assert f"_{name}" in lowered.as_text()
        got = np.asarray(lowered.compile()(x, weight), np.float64)
        if kind == "w8a8":
            rows_of_x = jax.jit(lambda x: quantize(x, "int8"))(x)
            left = np.asarray(rows_of_x.values, np.float64) * np.asarray(rows_of_x.scale, np.float64)[:, None]
        else:
            left = np.asarray(x, np.float64)
        right = (
            np.asarray(weight.values.astype(jnp.float32), np.float64) * np.asarray(weight.scale)[:, None]
            if kind not in INPUTS
            else np.asarray(weight, np.float64)
        )
        np.testing.assert_allclose(got, left @ right.T, atol=3e-6 * np.abs(left @ right.T).max())


def test_what_features_allow() -> None:
    assert processor(native.Target(X86, features=AVX2)).lanes == 8
    assert processor(native.Target("riscv64-unknown-linux-gnu")).bytes == "widened"
