"""Prompt attention for data-centre Blackwell, compiled. `test_shipped_ptx_ampere` executes its PTX."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jax
import pytest
from ampere_attention import BLACKWELL_CASES
from kernel_facts import facts_elsewhere

from benchmarks.compiled_kernels import row
from benchmarks.machine import RESULTS
from tests.compiling import optimized
from tests.extras import compiler_for_gpus

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic infers no layouts for it")
RECORD = json.loads((RESULTS / "compiled_kernels.json").read_text())
FEW = (
    "prompts, head dim 128, pages of 16, window, cap",
    "prompts, head dim 256, fp8",
    "prompts, head dim 64, group 8, window, sinks",
)


def check_compiled(names: Sequence[str]) -> None:
    compiler_for_gpus()
    with optimized():
        every = facts_elsewhere("b200", [BLACKWELL_CASES[name] for name in names])
    for name, facts in zip(names, every, strict=True):
        assert facts.spilled == 0, name
        assert facts.blocks(facts.threads) >= 1, name
        assert not facts.misaligned and not facts.mixed_up, name
        if jax.__version__ == RECORD["machine"]["jax"]:  # others compile to other code
            assert row(name, facts) in RECORD["targets"]["b200"]
        assert facts.bulk_copies > 0 and facts.code.count("UTCHMMA") == facts.products > 0, name


def test_a_kernel_spills_nothing_and_fits() -> None:
    check_compiled(FEW)


@pytest.mark.full
def test_every_kernel_spills_nothing_and_fits() -> None:
    check_compiled(list(BLACKWELL_CASES))
