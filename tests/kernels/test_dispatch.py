"""The choice between kernels and XLA, and rejected arguments."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import ampere, dispatch, work_list, xla
from pallas_kernels.attention.cpu import attention
from pallas_kernels.attention.dispatch import paged_attention_decode
from pallas_kernels.attention.hopper import decode as attention_decode
from pallas_kernels.attention.hopper import prefill as attention_prefill
from pallas_kernels.attention.options import PLAIN, AttentionOptions
from pallas_kernels.cache import dispatch as cache_dispatch
from pallas_kernels.cache import xla as cache_xla
from pallas_kernels.cache.qkv import Qkv, QkvProduct
from pallas_kernels.quantization.quantized import movable, quantize
from pallas_kernels.targets import why_none

HOPPER: Any = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
AMPERE: Any = SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")
VOLTA: Any = SimpleNamespace(device_kind="NVIDIA V100", compute_capability="7.0")


def arrays(
    heads: int = 8, kv_heads: int = 2, head_dim: int = 64, page_size: int = 16, dtype: Any = jnp.bfloat16
) -> tuple[jax.Array, ...]:
    rng, pages = np.random.default_rng(0), (5, kv_heads, page_size, head_dim)
    return tuple(
        jnp.asarray(rng.normal(size=shape).astype(dtype)) for shape in ((2, heads, head_dim), pages, pages)
    )


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"head_dim": 128, "page_size": 64},
        {"head_dim": 256, "page_size": 128},
        {"heads": 128},
        {"kv_heads": 8},
        {"dtype": jnp.float16},
    ],
)
def test_what_the_decode_kernel_takes(shape: dict[str, Any]) -> None:
    assert why_none(dispatch.DECODE, HOPPER, *arrays(**shape), PLAIN) is None


@pytest.mark.parametrize(
    ("shape", "device", "reason"),
    [
        ({}, VOLTA, "device=NVIDIA V100"),
        ({"dtype": jnp.float16}, None, "k_pages=float16: the kernel takes bfloat16, float32"),
        ({"dtype": jnp.float32}, HOPPER, "dtype=float32"),
        ({"head_dim": 96}, HOPPER, "head_dim=96"),
        ({"page_size": 8}, HOPPER, "page_size=8"),
        ({"page_size": 96}, HOPPER, "page_size=96"),
        ({"heads": 130}, HOPPER, "heads=130"),
    ],
)
def test_what_it_does_not_take_and_why(shape: dict[str, Any], device: Any, reason: str) -> None:
    said = why_none(dispatch.DECODE, device, *arrays(**shape), PLAIN)
    assert said is not None and said.startswith(reason)


def test_eight_bit_caches_are_taken_and_others_not() -> None:
    q, k, v = arrays()
    int8, fp8 = ([movable(quantize(pages, kind)) for pages in (k, v)] for kind in ("int8", "float8_e4m3fn"))
    assert (
        why_none(dispatch.DECODE, HOPPER, q, *int8, PLAIN)
        is why_none(dispatch.DECODE, HOPPER, q, *fp8, PLAIN)
        is None
    )
    refusals: list[tuple[Any, str]] = [
        ((q, int8[0], v), "v_pages=bfloat16: the kernel takes what k_pages has, quantized int8"),
        ((q, int8[0], fp8[1]), "v_pages=quantized uint8"),
        ((q, quantize(k, "float8_e4m3fn"), v), "k_pages=quantized float8_e4m3fn"),
        ((q.astype(jnp.float16), k, v), "k_pages=bfloat16"),
        ((q.astype(jnp.float32), *int8), "dtype=float32"),
    ]
    for args, reason in refusals:
        assert str(why_none(dispatch.DECODE, HOPPER, *args, PLAIN)).startswith(reason)


TABLES, LENGTHS = np.array([[1, 2], [3, 0]]), np.array([20, 3])


OPTIONS = AttentionOptions(0.3, window=7)


def run(options: AttentionOptions = OPTIONS, **how: Any) -> jax.Array:
    return paged_attention_decode(*arrays(), jnp.asarray(TABLES), jnp.asarray(LENGTHS), options, **how)


def test_xla_takes_the_rest() -> None:
    want = xla.paged_attention_decode(*arrays(), jnp.asarray(TABLES), jnp.asarray(LENGTHS), OPTIONS)
    for how in ({"impl": "xla"}, {"impl": "xla", "device": HOPPER}, {"impl": "auto", "device": VOLTA}):
        np.testing.assert_array_equal(run(**how), want)


def test_a_cpu_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    want = attention.paged_attention_decode(*arrays(), jnp.asarray(TABLES), jnp.asarray(LENGTHS), OPTIONS)
    for impl in ("auto", "llvm"):
        np.testing.assert_array_equal(run(impl=impl), want)
    with pytest.raises(ValueError, match="impl='llvm': device=NVIDIA H200: the kernel is for CPUs"):
        run(impl="llvm", device=HOPPER)
    monkeypatch.setattr("pallas_kernels.devices.cpu_refused", lambda: "llvmlite is not installed")
    np.testing.assert_array_equal(run(), run(impl="xla"))
    with pytest.raises(ValueError, match="impl='llvm': llvmlite is not installed"):
        run(impl="llvm")


@pytest.mark.parametrize("ways", [{"impl": "auto", "device": VOLTA}, {"impl": "xla"}], ids=["auto", "xla"])
def test_xla_takes_what_it_was_given(ways: Any) -> None:
    q, k, v = arrays()
    new = Qkv(q, jnp.ones((2, 2, 64)), -jnp.ones((2, 2, 64))), jnp.array([3, 1]), jnp.array([2, 15])
    rotation = jnp.full((2, 32), 0.5), jnp.full((2, 32), 0.1)
    prefill: Any = (q[:, None], k, v, jnp.asarray(TABLES), jnp.array([4, 0]), jnp.array([1, 1]))
    masked: Any = {"options": replace(OPTIONS, soft_cap=4.0), "pages": 2}
    written = {"rows": 1, "rotation": rotation}
    calls: list[tuple[Any, Any, Any, Any]] = [
        (dispatch.paged_attention_prefill, xla.paged_attention_prefill, prefill, masked),
        (cache_dispatch.kv_write, cache_xla.kv_write, (k, v, *new), written),
        (cache_dispatch.copy_pages, cache_xla.copy_pages, (k, v, jnp.array([1]), jnp.array([4])), {}),
    ]
    for chosen, by_xla, args, options in calls:
        want = by_xla(*args, **options)
        jax.tree.map(np.testing.assert_array_equal, chosen(*args, **options, **ways), want)


def test_a_choice_that_cannot_be_met_is_an_error() -> None:
    with pytest.raises(ValueError, match="impl='mosaic': device=cpu: the kernel is for GPUs"):
        run(impl="mosaic")
    with pytest.raises(ValueError, match="impl='triton': one of"):
        run(impl="triton")
    q, k, v = arrays()
    where = jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32)
    calls: list[tuple[Any, Any]] = [
        (partial(cache_dispatch.kv_write, rows=2), (k, v, Qkv(q, q[:, :2], q[:, :2]), *where)),
        (cache_dispatch.copy_pages, (k, v, *where)),
    ]
    for function, args in calls:
        with pytest.raises(ValueError, match="impl='mosaic': device=cpu"):
            function(*args, impl="mosaic")
    with pytest.raises(ValueError, match="impl='mosaic': device=cpu"):
        dispatch.paged_attention_prefill(
            q[:, None], k, v, jnp.asarray(TABLES), *where, OPTIONS, impl="mosaic"
        )


def test_what_the_writing_kernel_takes() -> None:
    q, k, v = arrays()
    new = Qkv(q, q[:, :2], q[:, :2])
    half = QkvProduct(jnp.zeros((2, 2, 6, 64), jnp.float16), 4)
    assert why_none(cache_dispatch.KV_WRITE, HOPPER, k, v, new) is None
    assert why_none(cache_dispatch.KV_WRITE, HOPPER, *(x.astype(jnp.float16) for x in (k, v)), half) is None
    int8, fp8 = movable(quantize(k, "int8")), movable(quantize(v, "float8_e4m3fn"))
    for pages in (int8, fp8):
        assert why_none(cache_dispatch.KV_WRITE, HOPPER, pages, pages, new) is None
        assert why_none(cache_dispatch.PAGE_COPY, HOPPER, pages, pages) is None
    refusals: list[tuple[Any, str]] = [
        ((k, v, new._replace(q=q.astype(jnp.float32))), "qkv=float32: the kernel takes bfloat16 and float16"),
        ((k, v, half), "qkv=float16: the kernel takes the cache's dtype, bfloat16"),
        ((quantize(k, "float8_e4m3fn"), v, new), "k_pages=quantized float8_e4m3fn"),
        ((int8, fp8, new), "v_pages=quantized uint8: the kernel takes what k_pages has, quantized int8"),
        ((k[..., :32], v[..., :32], new), "head_dim=32"),
    ]
    for args, reason in refusals:
        assert str(why_none(cache_dispatch.KV_WRITE, HOPPER, *args)).startswith(reason)


@pytest.mark.parametrize("impl", ["auto", "mosaic"])
def test_the_kernel_is_taken_with_what_it_was_given(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        attention_decode,
        "paged_attention_decode",
        lambda *args, **how: given.update(how, options=args[-1]) or args[0],
    )
    k = arrays()[1]
    work = jax.jit(partial(dispatch.decode_work, tokens=64, heads=4, window=7, device=HOPPER))(
        k, jnp.asarray(LENGTHS)
    )
    assert work is not None
    options = replace(OPTIONS, soft_cap=4.0)
    np.testing.assert_array_equal(run(options, impl=impl, device=HOPPER, work=work, pages=2), arrays()[0])
    assert given == {"options": options, "work": work, "device": HOPPER}


def test_work_lists_are_for_hopper_and_as_batch_invariance_asks() -> None:
    k, lengths = arrays()[1], jnp.asarray(LENGTHS)
    assert (
        dispatch.decode_work(k, lengths, tokens=64, heads=4)
        is dispatch.decode_work(k, lengths, tokens=64, heads=4, device=AMPERE)
        is None
    )
    how: dict[str, Any] = {"tokens": 64, "heads": 4, "device": HOPPER}
    even, fixed = (
        jax.jit(partial(dispatch.decode_work, batch_invariant=fixed, **how))(k, lengths)
        for fixed in (False, True)
    )
    assert even is not None and fixed is not None
    assert even.blocks == fixed.blocks == work_list.decode_blocks(k, HOPPER)
    assert len(even.joins) == even.blocks and len(fixed.joins) == len(lengths) * k.shape[1]
    assert even.most_rows == fixed.most_rows == 1


def test_rows_of_a_sequence_are_grouped_as_far_as_a_product_holds_their_queries() -> None:
    k, lengths = arrays()[1], jnp.asarray([5, 6, 7, 5], jnp.int32)
    owners = jnp.asarray([1, 1, 1, 2], jnp.int32)
    for heads, rows in (8, [3, 1]), (64, [2, 1, 1]), (128, [1] * 4):
        make = partial(dispatch.decode_work, tokens=64, heads=heads, device=HOPPER)
        work = jax.jit(make)(k, lengths, owners=owners)
        assert work is not None
        by_head = {(int(item[0]), int(item[1])): int(item[7]) for item in work.items if item[3]}
        assert [by_head[row, 1] for row in sorted({row for row, _ in by_head})] == rows


def test_the_prefill_kernel_learns_the_device_whose_multiprocessors_it_fills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = arrays()
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        attention_prefill,
        "paged_attention_prefill",
        lambda *args, **how: given.update(how, options=args[-1]) or args[0],
    )
    tiles, where = jnp.repeat(q[:, None], 8, axis=1), (jnp.array([4, 0]), jnp.array([1, 1]))
    dispatch.paged_attention_prefill(tiles, k, v, jnp.asarray(TABLES), *where, OPTIONS, device=HOPPER)
    assert given == {"options": OPTIONS, "device": HOPPER, "until": None}


def test_ampere_has_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays(heads=130, kv_heads=2)
    assert why_none(dispatch.DECODE, AMPERE, q, k, v, PLAIN) is None  # a group of any size
    tiles = jnp.zeros((2, 3, 130, 64), jnp.bfloat16)  # and tiles of any size
    assert why_none(dispatch.PREFILL, AMPERE, tiles, k, v, PLAIN) is None
    assert str(why_none(dispatch.PREFILL, HOPPER, tiles[:, :, :8], k, v, PLAIN)).startswith("tile=3")
    for kind in "int8", "float8_e4m3fn":
        eight = [movable(quantize(pages, kind)) for pages in (k, v)]
        assert why_none(dispatch.DECODE, AMPERE, q, *eight, PLAIN) is None
        assert why_none(dispatch.PREFILL, AMPERE, tiles, *eight, PLAIN) is None
        assert why_none(cache_dispatch.KV_WRITE, AMPERE, *eight, Qkv(q, k[0], v[0])) is None
    assert str(why_none(dispatch.PREFILL, AMPERE, tiles, *eight, PLAIN, True)).startswith("until")
    assert why_none(cache_dispatch.PAGE_COPY, AMPERE, k, v) is None
    given: list[str] = []
    for name in ("paged_attention_decode", "paged_attention_prefill"):
        monkeypatch.setattr(ampere, name, lambda *arrays, name=name, **how: given.append(name) or arrays[0])
    paged_attention_decode(
        q, k, v, jnp.asarray(TABLES), jnp.asarray(LENGTHS), OPTIONS, device=AMPERE, impl="mosaic"
    )
    where = jnp.array([4, 0]), jnp.array([1, 1])
    dispatch.paged_attention_prefill(
        tiles, k, v, jnp.asarray(TABLES), *where, OPTIONS, device=AMPERE, impl="mosaic"
    )
    assert given == ["paged_attention_decode", "paged_attention_prefill"]
