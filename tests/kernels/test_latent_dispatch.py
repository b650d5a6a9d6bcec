"""The choice of latent attention's implementation, and rejected arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import targets
from pallas_kernels.attention import dispatch
from pallas_kernels.attention.hopper import latent as latent_decode
from pallas_kernels.attention.latent import (
    LATENT_DECODE,
    LATENT_PREFILL,
    latent_attention_decode,
    latent_attention_prefill,
    latent_decode_work,
)
from pallas_kernels.attention.options import PLAIN, AttentionOptions
from pallas_kernels.quantization.quantized import movable, quantize
from pallas_kernels.targets import why_none

HOPPER: Any = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
AMPERE: Any = SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")
OPTIONS = AttentionOptions(0.3)
TABLES, LENGTHS = np.array([[1, 2], [3, 0]]), np.array([20, 3])


def arrays(
    heads: int = 16, key_dim: int = 192, page_size: int = 16, dtype: Any = jnp.bfloat16
) -> tuple[jax.Array, jax.Array]:
    q, pages = jax.random.key(0), jax.random.key(1)
    return jax.random.normal(q, (2, heads, key_dim), dtype), jax.random.normal(
        pages, (5, 1, page_size, key_dim), dtype
    )


def shapes(**shape: Any) -> Any:
    return jax.eval_shape(lambda: arrays(**shape))


def test_what_the_kernel_takes() -> None:
    for heads in (1, 16, 20, 64, 128):
        assert (
            why_none(LATENT_DECODE, HOPPER, *shapes(heads=heads, key_dim=576, page_size=64), PLAIN, 512)
            is why_none(LATENT_DECODE, AMPERE, *shapes(heads=heads), PLAIN, 128)
            is None
        )
    assert why_none(LATENT_DECODE, HOPPER, *shapes(dtype=jnp.float16), PLAIN, 128) is None
    assert why_none(LATENT_PREFILL, AMPERE, *shapes(key_dim=576), PLAIN, 512) is None
    assert str(why_none(LATENT_PREFILL, HOPPER, *shapes(), PLAIN, 128)).startswith("device=NVIDIA H200")


@pytest.mark.parametrize(
    ("shape", "rank", "device", "reason"),
    [
        ({"key_dim": 1024}, 512, AMPERE, "key_dim=1024"),
        ({"dtype": jnp.float32}, 128, HOPPER, "dtype=float32"),
        ({}, 64, HOPPER, "rank=64: the kernel takes 128, 256, 384, 512"),
        ({"key_dim": 1024}, 512, HOPPER, "key_dim=1024: the kernel takes multiples of 64 from rank to 576"),
        ({"key_dim": 160}, 128, HOPPER, "key_dim=160"),
        ({"key_dim": 64}, 128, HOPPER, "key_dim=64"),
        ({"page_size": 8}, 128, HOPPER, "page_size=8"),
        ({"page_size": 96}, 128, HOPPER, "page_size=96"),
    ],
)
def test_what_it_does_not_take_and_why(shape: dict[str, Any], rank: int, device: Any, reason: str) -> None:
    q, pages = shapes(**shape)
    assert str(why_none(LATENT_DECODE, device, q, pages, PLAIN, rank)).startswith(reason)
    with pytest.raises(ValueError, match=f"impl='mosaic': {reason}"):
        latent_attention_decode(q, pages, TABLES, LENGTHS, OPTIONS, rank=rank, impl="mosaic", device=device)


def test_other_caches_are_rejected() -> None:
    q, pages = shapes()
    _, half = shapes(dtype=jnp.float16)
    assert str(why_none(LATENT_DECODE, HOPPER, q, half, PLAIN, 128)).startswith("pages=float16")
    eight: Any = jax.eval_shape(lambda x: movable(quantize(x, "int8")), pages)
    assert str(why_none(LATENT_DECODE, HOPPER, q, eight, PLAIN, 128)).startswith("pages=int8")


def test_elsewhere_the_vectors_are_keys_and_values() -> None:
    q, pages = arrays()
    where, how = (jnp.asarray(TABLES), jnp.asarray(LENGTHS)), {"options": OPTIONS, "rank": 128}
    for impl, device in (("auto", None), ("xla", HOPPER)):
        want = dispatch.paged_attention_decode(
            q, pages, pages, *where, OPTIONS, pages=2, impl=impl, device=device
        )[..., :128]
        got = latent_attention_decode(q, pages, *where, **how, most_pages=2, impl=impl, device=device)
        np.testing.assert_array_equal(got, want)
    tiles, at = q[:, None], (jnp.array([4, 0]), jnp.array([1, 1]))
    want = dispatch.paged_attention_prefill(tiles, pages, pages, where[0], *at, OPTIONS)[..., :128]
    np.testing.assert_array_equal(latent_attention_prefill(tiles, pages, where[0], *at, **how), want)
    with pytest.raises(ValueError, match="impl='mosaic': device=NVIDIA H200"):
        latent_attention_prefill(tiles, pages, where[0], *at, **how, impl="mosaic", device=HOPPER)


@pytest.mark.parametrize("impl", ["auto", "mosaic"])
def test_the_kernel_is_taken_with_what_it_was_given(impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        latent_decode,
        "latent_attention_decode",
        lambda *args, **how: given.update(how, options=args[-1]) or args[0],
    )
    q, pages = arrays()
    work: Any = object()
    latent_attention_decode(
        q,
        pages,
        jnp.asarray(TABLES),
        jnp.asarray(LENGTHS),
        OPTIONS,
        rank=128,
        most_pages=2,
        work=work,
        impl=impl,
        device=HOPPER,
    )
    assert given == {"rank": 128, "options": OPTIONS, "work": work, "device": HOPPER}


def test_a_work_list_has_a_pair_for_each_64_heads() -> None:
    lengths = jnp.asarray([640, 0, 64])
    assert latent_decode_work(16, lengths) is latent_decode_work(16, lengths, device=AMPERE) is None
    work = jax.jit(lambda lengths: latent_decode_work(96, lengths, device=HOPPER))(lengths)
    assert work is not None and work.blocks == targets.CORES
    assert int(work.items[:, 3].sum()) == 2 * 11  # tiles
    blocks = {heads: latent_decode.head_blocks(heads) for heads in (16, 20, 64, 96, 128)}
    # whole tiles of 8 rows
    assert blocks == {16: (1, 16), 20: (1, 24), 64: (1, 64), 96: (2, 48), 128: (2, 64)}
