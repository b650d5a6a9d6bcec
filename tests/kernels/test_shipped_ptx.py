"""Every Mosaic kernel, as it ships: its PTX, executed on a CPU. Attention is in files of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.compilation.ahead_of_time import device
from pallas_kernels.products.groups import grouped, one_group
from pallas_kernels.products.hopper.grouped_product import grouped_product
from pallas_kernels.products.weights import stored
from pallas_kernels.quantization.quantized import Quantized, dequantize, quantize
from tests.extras import compiler_for_gpus
from tests.kernels.executed import FEW, Executed
from tests.kernels.shipped import AMPERE, CASES, E4M3, FP8_BLOCKS, MORE, MORE_AMPERE, Check, parameters
from tests.kernels.test_ampere_product import check_grouped as check_experts

compiler_for_gpus()

ATTENTION = ("paged_attention_decode", "latent_attention_decode", "paged_attention_prefill")
OTHER_WAYS = re.compile(r"\b(pallas_call|as_gpu_kernel|ffi_call)\(")


@pytest.mark.parametrize(
    ("check", "schedules", "covered"), parameters(*(name for name in CASES if name not in ATTENTION))
)
def test_the_reference_is_met(check: Check, schedules: Any, covered: float) -> None:
    executed = Executed(schedules)
    check(runner=executed.runner)
    assert executed.least_covered() >= covered


@pytest.mark.parametrize(("kind", "dtype"), [("int8", "bfloat16"), (E4M3, "bfloat16"), ("int8", "float16")])
def test_every_eight_bit_number_is_converted_exactly(kind: str, dtype: str) -> None:
    every = np.arange(256, dtype=np.uint8).view(jnp.dtype(kind))
    numbers = np.resize(every[np.isfinite(every.astype(np.float32))], (64, 64)).T
    groups, block = one_group(64)
    run = partial(grouped_product, block=block, dtype=jnp.float32)
    x, weight = jnp.eye(64, dtype=dtype), jnp.asarray(numbers)[None]
    got = Executed(FEW[:1]).runner.run(run, x, weight, None, groups)
    np.testing.assert_array_equal(got, numbers.T.astype(np.float32))


@pytest.mark.parametrize("experts", [None, 3])
def test_both_sides_of_a_product_are_scaled_by_group(experts: int | None) -> None:
    """Rows are quantized in a kernel of their own. XLA's form rounds products of numbers and scales."""
    rng, kernel = np.random.default_rng(0), dict[str, Any](impl="mosaic", device=device("h200"))
    factors, shape = np.repeat([1, 8, 64], 128), (64, 384) if experts is None else (experts, 64, 384)
    x = jnp.asarray(rng.normal(size=(9, 384)) * factors, jnp.bfloat16)
    numbers = jnp.asarray(rng.normal(size=shape) / factors, jnp.bfloat16)
    weight, chosen = quantize(numbers, E4M3, inputs=True, by_group=True), jnp.arange(9) % (experts or 1)
    sides = quantize(x.astype(jnp.float32), E4M3, by_group=True), replace(weight, dtype="float32")
    rows, matrices = (np.asarray(dequantize(side), np.float64) for side in sides)
    want = np.einsum("ri,roi->ro", rows, matrices.reshape(-1, 64, 384)[np.asarray(chosen)])

    def run(x: jax.Array, weight: Quantized, impl: str) -> jax.Array:
        how = {**kernel, "impl": impl}
        if experts is None:
            return stored(weight).on_gpu(x, jnp.dtype("float32"), **how)
        groups = grouped(chosen, experts)
        return stored(weight).grouped_product(x[groups.row], groups, **how)[groups.place]

    executed = Executed(FEW[:1])
    got = executed.runner.run(run, x, weight, "mosaic")
    assert {one.kernel for one in executed.runs} == {"quantize_rows", "grouped_product"}
    exact = experts is None  # the result is in float32
    for result, error in (got, 1e-5 if exact else 1e-2), (run(x, weight, "xla"), 1e-2):
        np.testing.assert_allclose(np.asarray(result, np.float64), want, atol=error * np.abs(want).max())


def sources() -> dict[str, str]:
    """Of everything but kernels for CPUs."""
    folder = Path(pallas_kernels.__file__).parent
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.py")}
    return {
        name: file.read_text()
        for name, file in files.items()
        if not name.startswith("llvm/") and "/cpu" not in name
    }


def kernel_names(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "plgpu.kernel":
            yield next(ast.literal_eval(word.value) for word in node.keywords if word.arg == "kernel_name")


def test_no_kernel_is_missing() -> None:
    names = [name for source in sources().values() for name in kernel_names(source)]
    assert {*names} == {*CASES, *AMPERE}
    assert {*MORE} <= {*CASES} and {*MORE_AMPERE} <= {*AMPERE}


def test_the_example_of_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "ptx-machine.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "example.py", "exec"), {})


def test_there_are_only_mosaic_kernels() -> None:
    assert not [name for name, source in sources().items() if OTHER_WAYS.search(source)]


def test_experts_by_group_have_a_kernel_that_quantizes_rows() -> None:
    check = partial(check_experts, (12, 0, 25), 128, 256, FP8_BLOCKS, "bfloat16", target="h200")
    kernels = [kernel.name.rpartition("_")[0] for kernel in Executed(FEW).compiled(check)]
    assert kernels == ["quantize_rows", "grouped_product"]
