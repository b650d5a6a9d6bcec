"""Prompt attention and products for data-centre Blackwell, compiled. `test_shipped_ptx_ampere` executes their
PTX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import jax
import pytest
from ampere_attention import BLACKWELL_CASES
from ampere_products import BLACKWELL_FORMATS, BLACKWELL_PRODUCTS
from kernel_counts import B200, count, tile_in_tensor_memory
from kernel_facts import facts_elsewhere

from benchmarks.compiled_kernels import row
from benchmarks.machine import RESULTS
from tests.compiling import optimized
from tests.extras import compiler_for_gpus

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic infers no layouts for it")
RECORD = json.loads((RESULTS / "compiled_kernels.json").read_text())
SAME_JAX = jax.__version__ == RECORD["machine"]["jax"]  # others compile to other code
FEW = (
    "prompts, head dim 128, pages of 16, window, cap",
    "prompts, head dim 256, fp8",
    "prompts, head dim 64, group 8, window, sinks",
)
FEW_PRODUCTS = ("int8, 64 rows", "fp8 in groups of 128, 256 rows", "both fp8 in groups of 128, 256 rows")
CASES = BLACKWELL_CASES | BLACKWELL_PRODUCTS
# at most: instructions that a scheduler issues for a tile
LIMITS = {"int8, 64 rows": 350.5, "both fp8 in groups of 128, 256 rows": 319}


def check_compiled(names: Sequence[str]) -> None:
    compiler_for_gpus()
    with optimized():
        every = facts_elsewhere("b200", [CASES[name] for name in names])
    for name, facts in zip(names, every, strict=True):
        assert facts.spilled == 0, name
        # few rows leave registers and shared memory for two blocks
        two = name.startswith(("int8", "fp8")) and ("16 rows" in name or name == "int8, 64 rows")
        assert facts.blocks(facts.threads) >= 1 + two, name
        assert not facts.misaligned and not facts.mixed_up, name
        if (
            name in BLACKWELL_CASES and jax.__version__ == RECORD["machine"]["jax"]
        ):  # others compile otherwise
            assert row(name, facts) in RECORD["targets"]["b200"]
        in_tensor_memory = len(re.findall("UTC[HQI]MMA", facts.code))
        if name in LIMITS:
            tile = tile_in_tensor_memory(BLACKWELL_FORMATS[name.rpartition(", ")[0]])
            counted = count(facts, tile, B200)
            assert counted.products + counted.copies <= LIMITS[name], name
        assert facts.bulk_copies > 0 and in_tensor_memory == facts.products > 0, name


def test_a_kernel_spills_nothing_and_fits() -> None:
    check_compiled(FEW + FEW_PRODUCTS)


@pytest.mark.full
def test_every_kernel_spills_nothing_and_fits() -> None:
    check_compiled(list(CASES))
