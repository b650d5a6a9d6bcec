"""Kernels compiled for an H200 that is not there: what the compiler says of them."""

from __future__ import annotations

import os
import re

import pytest
from kernel_facts import CASES, INTERPRETED, THREADS, Case

from pallas_kernels.ahead_of_time import MAX_SHARED, device, kernel_facts

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra aot: pip install '.[aot]'")
if os.environ.get("JAX_PLATFORMS") != "cpu":
    pytest.skip("needs JAX_PLATFORMS=cpu: the plugin looks for all of CUDA otherwise", allow_module_level=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_kernel_spills_nothing_and_fits(case: Case) -> None:
    function, args = case
    [facts], compiled = kernel_facts(device("h200"), function, *args)
    assert facts.spilled == 0
    assert facts.shared <= MAX_SHARED
    assert facts.products > 0
    head_dim = args[0].shape[-1]
    assert facts.blocks(THREADS) >= (1 if head_dim == 256 or "soft_cap" in function.keywords else 2)
    text = compiled.as_text()
    assert text is not None and "mosaic_gpu" in text
    assert not re.search(r"\b(while|conditional)\(", text)  # XLA would wait for the host


@pytest.mark.parametrize("case", INTERPRETED.values(), ids=INTERPRETED.keys())
def test_the_interpreted_form_compiles_too(case: Case) -> None:
    function, args = case
    [facts], _ = kernel_facts(device("h200"), function, *args)
    assert facts.shared <= MAX_SHARED
    assert facts.products > 0


def test_targets_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="target='h20': one of h200"):
        device("h20")
