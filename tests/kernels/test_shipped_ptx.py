"""Every Mosaic kernel, as it ships: its PTX, executed on a CPU. Attention is in files of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.products.groups import one_group
from pallas_kernels.products.hopper.grouped_product import grouped_product
from tests.extras import compiler_for_gpus
from tests.kernels.executed import FEW, Executed
from tests.kernels.shipped import AMPERE, CASES, E4M3, MORE, MORE_AMPERE, Check, parameters

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
    assert sorted(names) == sorted([*CASES, *AMPERE])
    assert {*MORE} <= {*CASES} and {*MORE_AMPERE} <= {*AMPERE}


def test_the_example_of_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "ptx-machine.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "example.py", "exec"), {})


def test_there_are_only_mosaic_kernels() -> None:
    assert not [name for name, source in sources().items() if OTHER_WAYS.search(source)]
