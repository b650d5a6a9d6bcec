"""Attention's options as one value: a tree for `jax.jit`, and refused where an implementation lacks one of
them.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import dispatch
from pallas_kernels.attention import latent as latent_dispatch
from pallas_kernels.attention.ampere import paged_attention_prefill as on_ampere
from pallas_kernels.attention.hopper.decode import paged_attention_decode as on_hopper
from pallas_kernels.attention.hopper.latent import latent_attention_decode
from pallas_kernels.attention.hopper.prefill import paged_attention_prefill as prompts_on_hopper
from pallas_kernels.attention.options import PLAIN, WORDS, AttentionOptions
from pallas_kernels.attention.support import CPU_OPTIONS
from pallas_kernels.targets import why_none

HOPPER: Any = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
Q: Any = jax.ShapeDtypeStruct((2, 8, 64), jnp.bfloat16)
PAGES: Any = jax.ShapeDtypeStruct((9, 2, 16, 64), jnp.bfloat16)
SLOPES = AttentionOptions(0.1, slopes=jnp.ones(8))


def test_arrays_are_traced_and_the_rest_is_static() -> None:
    traces = []

    @jax.jit
    def run(options: AttentionOptions) -> jax.Array:
        traces.append(options.static)
        assert options.sinks is not None
        return options.sinks * options.scale

    for sinks in (jnp.zeros(4), jnp.ones(4)):
        run(AttentionOptions(0.5, window=7, sinks=sinks))
    assert traces == [AttentionOptions(0.5, window=7)]
    run(AttentionOptions(0.5, window=8, sinks=jnp.ones(4)))
    assert len(traces) == 2
    assert len({*traces}) == 2  # hashable


def test_what_is_not_taken_is_named_with_its_value() -> None:
    options = AttentionOptions(0.1, window=7, soft_cap=30.0, sinks=jnp.ones(4))
    assert options.refused("window", "soft_cap", "sinks") is None
    assert options.refused("window", "sinks") == "soft_cap=30.0: the kernel has no soft cap"
    assert options.refused("window", "soft_cap") == "sinks: the kernel has no sinks"
    assert {*WORDS} == {field.name for field in fields(options)} - {"scale", "causal"} == {*CPU_OPTIONS}


@pytest.mark.parametrize("kernel", [on_hopper, prompts_on_hopper, on_ampere, latent_attention_decode])
def test_a_kernel_that_is_called_directly_refuses_what_it_has_not(kernel: Any) -> None:
    arrays = [Q] * (5 if kernel not in (prompts_on_hopper, on_ampere) else 6)
    how = {"rank": 128} if kernel is latent_attention_decode else {}
    with pytest.raises(ValueError, match=r"slopes: the kernel has no ALiBi"):
        kernel(*arrays[: 4 if how else None], SLOPES, **how)


def test_slopes_and_latent_windows_are_refused_before_a_kernel_is_chosen() -> None:
    assert why_none(dispatch.DECODE, HOPPER, Q, PAGES, PAGES, PLAIN) is None
    assert why_none(dispatch.DECODE, HOPPER, Q, PAGES, PAGES, SLOPES) == "slopes: the kernel has no ALiBi"
    q, pages = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 16, 192), (9, 1, 16, 192)))
    windowed = AttentionOptions(0.1, window=7)
    table = latent_dispatch.LATENT_DECODE
    assert why_none(table, HOPPER, q, pages, PLAIN, 128) is None
    assert why_none(table, HOPPER, q, pages, windowed, 128) == "window=7: the kernel has no window"
