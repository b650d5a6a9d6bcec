"""Mosaic GPU kernels on a CPU, interpreted with race detection, and paged caches whose unused parts are NaN.

Pallas checks loads, stores and copies for races, but not what matrix products read (jax 0.12): a missing wait
before one shows only where the product reads what is not there yet. jax 0.11.2 also fails if no
thread has waited for a barrier when its phase completes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.quantization.quantized import Quantized
from tests.kernels import semaphores_model

RACES = plgpu.InterpretGPUParams(detect_races=True)  # fresh memory is NaN
HOPPER = AbstractMesh(
    (), (), abstract_device=AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=8)
)


def interpret(function: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """function(*args, **how), whose kernels have interpret=RACES, for a Hopper GPU; it fails if a kernel
    races.
    """
    interpret_pallas_call.reset_gpu_interpret_mode_state()  # an earlier failure leaves some
    with jax.sharding.use_abstract_mesh(HOPPER), semaphores_model.interpreted():
        out = jax.block_until_ready(function(*args, **how))
    assert not interpret_pallas_call.get_races().races_found, "races_found"
    return out


@dataclass(frozen=True)
class Runner:
    """How a check runs a function with kernels.

    Attributes:
        run: calls its first argument with the others.
        interpret: of the kernels; None: they run as they ship.
    """

    run: Callable[..., Any]
    interpret: plgpu.InterpretGPUParams | None

    def form(self, **interpreted: Any) -> dict[str, Any]:
        """Arguments of a kernel; `interpreted`: those of the form that Pallas interprets."""
        return {} if self.interpret is None else {"interpret": self.interpret, **interpreted}


INTERPRETED = Runner(interpret, RACES)


def largest_error(got: Any, want: Any) -> float:
    """In parts of the largest number that is wanted."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-30))


def normal(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> jax.Array:
    """Random numbers, of numpy: XLA would compile their generation for each shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


class Cache(NamedTuple):  # made and changed in numpy: XLA would compile each operation for each shape
    k: jax.Array  # [num_pages, kv_heads, page_size, head_dim]
    v: jax.Array
    tables: jax.Array  # [rows, width]
    lengths: jax.Array  # [rows]

    def clean(self) -> Cache:
        """The values in float32, with zeros instead of NaN."""
        k, v = (jnp.asarray(np.nan_to_num(np.asarray(pages, np.float32))) for pages in self[:2])
        return self._replace(k=k, v=v)


def cache(
    lengths: Sequence[int],
    width: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
    seed: int,
) -> Cache:
    """Pages in random order. The last row shares its first page with the row before, and rows of length 0
    name the null page.

    What no row's length covers is NaN in the cache and out of range in the table.
    """
    rng = np.random.default_rng(seed)
    rows, num_pages = len(lengths), len(lengths) * width + 1
    order = rng.permutation(np.arange(1, num_pages)).reshape(rows, width)
    order[-1, 0] = order[-2, 0]
    pages = np.arange(width) * page_size
    tables = np.where(pages < np.array(lengths)[:, None], order, num_pages)
    used = np.zeros((num_pages, page_size), bool)
    for row, length in enumerate(lengths):
        if length == 0:
            tables[row] = 0
        for token in range(length):
            used[tables[row, token // page_size], token % page_size] = True
    shape = num_pages, kv_heads, page_size, head_dim
    k, v = (
        jnp.asarray(np.where(used[:, None, :, None], rng.normal(size=shape), np.nan), dtype) for _ in "kv"
    )
    return Cache(k, v, jnp.asarray(tables, jnp.int32), jnp.asarray(lengths, jnp.int32))


# of heads, in turn: as large as scores, so large that nothing else counts, and so small that they do not
SINKS = 1.0, 300.0, -40.0, 3.0


SLOPES = 0.5, 0.0, 0.03


def options_of(ways: dict[str, Any], heads: int) -> AttentionOptions:
    """Options of attention; True for sinks or slopes stands for those of this number of heads."""
    by_head = {name: numbers for name, numbers in (("sinks", SINKS), ("slopes", SLOPES)) if ways.get(name)}
    arrays = {name: jnp.resize(jnp.array(numbers), heads) for name, numbers in by_head.items()}
    return AttentionOptions(**ways | arrays)


def more_scales(pages: Quantized) -> Quantized:
    """The pages with one more row of scales, as in pages that are shared with layers of smaller heads;
    NaN.
    """
    return replace(pages, scale=jnp.pad(pages.scale, ((0, 0), (0, 1), (0, 0)), constant_values=np.nan))


def only_what_is_seen(
    paged: Cache,
    oldest: Sequence[int] | np.ndarray,
    ends: Sequence[int] | np.ndarray,
    window: int | None,
    *,
    behind: int | None = None,
) -> Cache:
    """NaN where no row's queries, of which the oldest is at the position given, see a token.

    Tables name no page where nothing is seen, or, behind the window, the page `behind`.
    """
    num_pages, _, page_size, _ = paged.k.shape
    tables, tokens = np.asarray(paged.tables), np.arange(paged.tables.shape[1] * page_size)
    starts = np.asarray(oldest)[:, None] - (window or len(tokens)) + 1
    seen = (tokens < np.asarray(ends)[:, None]) & (tokens >= starts)
    rows, places = np.nonzero(seen)
    used = np.zeros((num_pages, page_size), bool)
    used[tables[rows, places // page_size], places % page_size] = True
    named = np.where(seen.reshape(*tables.shape, page_size).any(-1), tables, num_pages)
    if behind is not None:
        named = np.where(tokens[page_size - 1 :: page_size] < starts, behind, named)
    k, v = np.array(paged.k), np.array(paged.v)
    for pages in (k, v):
        pages.swapaxes(1, 2)[~used] = np.nan
    return paged._replace(k=jnp.asarray(k), v=jnp.asarray(v), tables=jnp.asarray(named, jnp.int32))
