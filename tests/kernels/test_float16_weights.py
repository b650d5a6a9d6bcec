"""Attention over eight-bit caches in float16: weights times small scales must not underflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import ampere, xla
from pallas_kernels.attention.hopper import decode as hopper_decode
from pallas_kernels.attention.hopper import prefill as hopper_prefill
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.work_list import even_work
from pallas_kernels.products.groups import grouped
from pallas_kernels.products.xla import grouped_product
from pallas_kernels.quantization.formats import FP8
from pallas_kernels.quantization.quantized import dequantize, movable, quantize
from tests.kernels import reference
from tests.kernels.emulated import emulator
from tests.kernels.interpreted import INTERPRETED, cache

SIZE, TOKENS, TILE = 64, 64, 16  # head size, tokens of a row, queries of a tile
OPTIONS = AttentionOptions(scale=1.0)
HOW = INTERPRETED.form(operand_in_registers=False)


def hopper(q: jax.Array, k: Any, v: Any, tables: jax.Array, *where: jax.Array) -> Any:
    if q.ndim == 3:
        work = jax.jit(partial(even_work, kv_heads=1, blocks=1, window=None))(*where)
        attend: Callable[..., Any] = partial(hopper_decode.paged_attention_decode, work=work)
    else:
        attend = partial(hopper_prefill.paged_attention_prefill, stages=2, blocks=1)
    run = jax.jit(partial(attend, options=OPTIONS, **HOW))
    return INTERPRETED.run(run, q, k, v, tables, *where)


def of_module(module: Any, run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def attend(q: jax.Array, *arrays: Any) -> Any:
        kernel = module.paged_attention_decode if q.ndim == 3 else module.paged_attention_prefill
        return run(partial(kernel, **options), q, *arrays, OPTIONS)

    return attend


KERNELS = {
    "xla": of_module(xla, lambda kernel, *args: jax.jit(kernel)(*args), pages=1),
    "hopper": hopper,
    "ampere": of_module(ampere, emulator("late").run, splits=1),
}


@pytest.mark.parametrize("kind", [FP8, pytest.param("int8", marks=pytest.mark.full)])
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_of_what_counts_little_are_kept(kernel: str, tiles: bool, kind: str) -> None:
    """A first token takes nearly all of the weight and has no value, so that the others' values remain."""
    paged = cache([TOKENS, TOKENS], 1, 1, TOKENS, SIZE, "float16", seed=0)
    k, v = (np.zeros(paged.k.shape, np.float16) for _ in "kv")
    k[:, :, 0, 0] = 11
    v[:, :, 1:] = 0.1 + 0.01 * np.random.default_rng(1).normal(size=v[:, :, 1:].shape)
    pages = [movable(quantize(jnp.asarray(x), kind)) for x in (k, v)]
    where = [paged.lengths]
    if tiles:
        where = [paged.lengths - TILE, jnp.full(2, TILE, jnp.int32)]
    q = jnp.zeros((2, *([TILE] if tiles else []), 1, SIZE), jnp.float16).at[..., 0].set(1)
    got = KERNELS[kernel](q, *pages, paged.tables, *where)
    wide = [dequantize(replace(x, dtype="float32")) for x in pages]
    exact = reference.paged_attention_prefill if tiles else reference.paged_attention_decode
    want = exact(q, *wide, paged.tables, *where, OPTIONS)
    assert 0 < np.abs(want).max() < 2e-4
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0.05)


@pytest.mark.parametrize("kind", ["int8", FP8])
def test_sums_of_experts_before_their_scale_are_in_range(kind: str) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(2 * rng.normal(size=(8, 2048)), jnp.float16)
    weight = quantize(jnp.asarray(0.02 * np.abs(rng.normal(size=(1, 16, 2048))), jnp.float16), kind)
    groups = grouped(jnp.zeros(8, jnp.int32), 1)
    got = grouped_product(x[groups.row], weight.values, weight.scale, groups)[groups.place]
    wide = np.asarray(dequantize(replace(weight, dtype="float32")), np.float64)
    want = np.asarray(x, np.float64) @ wide[0].T
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-3, atol=2e-2)
