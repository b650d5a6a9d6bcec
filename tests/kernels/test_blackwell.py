"""Prompt attention for data-centre Blackwell, compiled. `test_shipped_ptx_ampere` executes its PTX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import pytest
from ampere_attention import BLACKWELL_CASES
from kernel_facts import facts_elsewhere

from tests.compiling import optimized
from tests.extras import compiler_for_gpus

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic infers no layouts for it")
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
        assert facts.bulk_copies > 0 and facts.code.count("UTCHMMA") == facts.products > 0, name


def test_a_kernel_spills_nothing_and_fits() -> None:
    check_compiled(FEW)


@pytest.mark.full
def test_every_kernel_spills_nothing_and_fits() -> None:
    check_compiled(list(BLACKWELL_CASES))
