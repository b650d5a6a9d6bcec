"""The kernels for Ampere and Ada against the float32 reference, emulated on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.ampere import BLOCKS_TO_FILL, SPLIT_TOKENS, default_splits, paged_attention_decode, paged_attention_prefill
from tests.kernels.emulated import Landing, emulated
from tests.kernels.interpreted import Cache, cache

Ways = dict[str, Any]
PLAIN: Ways = {"scale": 0.2}
WINDOW: Ways = {"scale": 0.3, "window": 70}
CAP: Ways = {"scale": 0.5, "soft_cap": 3.0}
BOTH: Ways = {"scale": 0.3, "window": 33, "soft_cap": 20.0}


def close(got: jax.Array, want: jax.Array, paged: Cache) -> None:
    """Within what is rounded to the dtype: each weight, and the result. Anything else is float32."""
    rounding = float(jnp.finfo(got.dtype).eps) / 2
    wanted = np.asarray(want, np.float32)
    allowed = 1.05 * rounding * (np.abs(wanted) + float(jnp.abs(paged.clean().v).max())) + 1e-5
    assert (np.abs(np.asarray(got, np.float32) - wanted) <= allowed).all()  # false where got is NaN


# head_dim, kv_heads, group, page_size, splits, dtype, ways, landing
DECODE = [
    (64, 2, 4, 64, None, "bfloat16", PLAIN, "late"),
    (128, 1, 9, 16, 3, "float16", BOTH, "late"),
    (64, 1, 1, 32, 2, "bfloat16", WINDOW, "early"),
    (256, 1, 4, 128, 1, "bfloat16", CAP, "late"),
]


@pytest.mark.parametrize(("head_dim", "kv_heads", "group", "page_size", "splits", "dtype", "ways", "landing"), DECODE)
def test_decode(
    head_dim: int, kv_heads: int, group: int, page_size: int, splits: int | None, dtype: str, ways: Ways, landing: Landing
) -> None:
    lengths = [1, page_size - 1, 0, page_size, page_size + 1, 320]
    paged = cache(lengths, -(-320 // page_size), kv_heads, page_size, head_dim, dtype, seed=page_size)
    q = jax.random.normal(jax.random.key(7), (len(lengths), kv_heads * group, head_dim)).astype(dtype)
    with emulated(landing):
        got = paged_attention_decode(q, *paged, **ways, splits=splits)
    close(got, reference.paged_attention_decode(q.astype(jnp.float32), *paged.clean(), **ways), paged)
    assert (got[2] == 0).all()
