"""Compares every kernel with `reference.py`: attention in float64 on the host, others in float32 at the
highest precision on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle, product, zip_longest
from multiprocessing import get_context
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.inputs import KINDS, Paged, checked
from benchmarks.gpu.rows import FAILED, Row, attempt, skipped
from benchmarks.gpu.work import Shape
from pallas_kernels.attention import dispatch
from pallas_kernels.attention import latent as latent_dispatch
from pallas_kernels.attention.latent import LATENT_DECODE, LATENT_PREFILL
from pallas_kernels.attention.options import PLAIN, AttentionOptions
from pallas_kernels.cache import dispatch as cache_dispatch
from pallas_kernels.cache.qkv import HeadNorm, QkvProduct
from pallas_kernels.devices import skip_cuda_check
from pallas_kernels.quantization.quantized import Pages, Quantized, dequantize
from pallas_kernels.targets import Impl, why_none
from tests.kernels import reference

Ways = dict[str, Any]
WAYS: tuple[Ways, ...] = (
    {"scale": 0.2},
    {"scale": 0.3, "window": 70},
    {"scale": 0.5, "soft_cap": 3.0},
    {"scale": 0.3, "window": 33, "soft_cap": 20.0},
    {"scale": 0.3, "window": 100, "sinks": True},
)
HEAD_DIMS, GROUPS, PAGE_SIZES = (64, 128, 256), (1, 4, 8), (16, 64, 128)
RANK, POSITION = 512, 64  # channels of latent attention's values, and of positions in its keys
PROCESSES = 8  # a case takes about 5 s, most of it in Python, which compiles a kernel
# The reference need not be fast, and autotuning takes seconds per case. Excess precision would drop the
# rounding between a rotation and an int8 page, which moves the page's scale.
EXACTLY = {"xla_gpu_autotune_level": "0", "xla_allow_excess_precision": False}
ROWS_OF = 1, 2, 1, 1, 3, 8, 9  # decode rows of sequences
EXPONENTIALS = 2e-5  # relative error of the hardware's exponentials and of float32 sums


class Case(NamedTuple):
    """One call of one function. Each function uses some of the fields.

    Attributes:
        function: decode, latent, prefill, kv_write or copy_pages.
        kind: format of the cache's numbers; None is dtype.
        ways: scale, window, soft cap and sinks for attention; batch_invariant for decode; norm for kv_write.
        size: tokens per tile, or tokens that are written; latent: 0 for rows.
        pairs: number of channel pairs that rotate; 0: no rotation.
        longest: tokens of the longest sequence.
    """

    function: str
    shape: Shape
    dtype: str
    kind: str | None = None
    ways: Ways = {}  # noqa: RUF012  never modified
    size: int = 0
    pairs: int = 0
    longest: int = 1500

    def __str__(self) -> str:
        shape = (
            f"{self.shape.kv_heads}x{self.shape.group} heads of {self.shape.head_dim}, pages of"
            f" {self.shape.page_size}"
        )
        more = [f"{name}={value}" for name, value in self.ways.items()]
        more += [f"{name}={value}" for name, value in (("size", self.size), ("pairs", self.pairs)) if value]
        return " ".join(
            [f"{self.function}: {self.dtype}", *([f"in {self.kind}"] if self.kind else []), shape, *more]
        )


class Comparison(NamedTuple):
    # largest error / allowed error; infinite if a result is NaN, or differs where it must be identical
    worst: float
    relative: float  # norm of the error / norm of the reference


def cases(small: bool) -> list[Case]:
    """All cases. Functions alternate, so an interrupted run has tested each; shapes are combined with varying
    dtypes and options.
    """
    if small:
        shape = Shape(2, 2, 64, 16)
        attention = [
            Case("decode", shape, "bfloat16", None, WAYS[3], longest=100),
            Case("prefill", shape, "bfloat16", "int8", WAYS[0], 16, longest=100),
        ]
        return [
            *attention,
            Case("kv_write", shape, "bfloat16", None, {}, 13, 32),
            Case("copy_pages", shape, "bfloat16", "float8_e4m3fn"),
        ]
    shapes = [Shape(1 + i % 2, *one) for i, one in enumerate(product(GROUPS, HEAD_DIMS, PAGE_SIZES))]
    shapes = shapes[::2] + shapes[1::2]
    # Periods have no common factor, so each value of one is combined with all values of the others.
    dtypes, ways, fixed = (
        cycle(("bfloat16", "bfloat16", "float16")),
        cycle((*WAYS, *WAYS[1:3])),
        cycle((False, True)),
    )
    tiles, tokens = cycle((64, 16, 128, 64, 48)), cycle((13, 1, 64, 300))
    pairs, heads = cycle((0, 32, 24, 64, 0, 32, 128)), cycle((1, 2, 8, 3, 4))
    groups, normed = cycle((1, 1, 4, 4)), cycle(({}, {"norm": True}))
    # Plain caches are combined with all shapes, eight-bit caches with every second one.
    kinds = [kind for i in range(len(shapes)) for kind in (KINDS if i % 2 else KINDS[:1])]
    shaped = [shape for i, shape in enumerate(shapes) for _ in (KINDS if i % 2 else KINDS[:1])]
    decode = [
        Case("decode", s, next(dtypes), k, next(ways) | {"batch_invariant": next(fixed)})
        for s, k in zip(shaped, kinds, strict=True)
    ]
    prefill = [
        Case("prefill", s, next(dtypes), k, next(ways), next(tiles))
        for s, k in zip(shaped, kinds, strict=True)
    ]
    latent = [
        Case("latent", Shape(1, h, RANK + POSITION, p), next(dtypes))
        for h, p in product((16, 20, 64, 128), PAGE_SIZES)
    ]
    flat = list(product(KINDS, HEAD_DIMS, PAGE_SIZES))
    write = [
        Case(
            "kv_write",
            Shape(next(heads), next(groups), d, p),
            next(dtypes),
            k,
            next(normed),
            next(tokens),
            min(next(pairs), d // 2),
        )
        for k, d, p in flat
    ]
    copy = [Case("copy_pages", Shape(2, 1, d, p), next(dtypes), k) for k, d, p in flat[::2]]
    latent += [
        Case("latent", Shape(1, h, RANK + POSITION, p), next(dtypes), size=16)
        for h, p in product((16, 128), PAGE_SIZES)
    ]
    return [
        case
        for turn in zip_longest(decode, prefill, write, copy, latent)
        for case in turn
        if case is not None
    ]


def measure(small: bool) -> Iterator[Row]:
    """Yields a row per case: kernels on a GPU, XLA's implementations elsewhere."""
    impl: Impl = "xla" if small else "mosaic"
    calls = [(case, impl, i) for i, case in enumerate(cases(small))]
    if small:
        yield from map(_row, calls)
        return
    # a case that breaks its process's CUDA context takes only that process's later cases with it
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), skip_cuda_check) as pool:
        yield from pool.map(_row, calls)


def _row(call: tuple[Case, Impl, int]) -> Row:
    return attempt(str(call[0]), partial(check, *call))


def check(case: Case, impl: Impl, seed: int) -> Row:
    """Runs one case, with inputs from the seed. `measure` uses the case's index as seed."""
    refused, run = CALLS[case.function](case, impl, seed)
    if refused is not None and impl == "mosaic":
        return skipped(str(case), refused)
    worst, relative = run()
    return Row(
        str(case),
        {"error / allowed": worst, "relative error": relative},
        outcome="ok" if worst <= 1 else FAILED,
    )


# why the kernel does not support the case, and a function that runs it
Prepared = tuple[str | None, Callable[[], Comparison]]


def _decode(case: Case, impl: Impl, seed: int) -> Prepared:
    page = case.shape.page_size
    lengths = [1, page - 1, 0, page, page + 1, case.longest, 129]
    paged = checked(lengths, case.shape, case.dtype, case.kind, seed)
    rows, owners = sum(ROWS_OF), np.repeat(np.arange(len(ROWS_OF)), ROWS_OF)
    shape = rows, case.shape.heads, case.shape.head_dim
    q = jax.random.normal(jax.random.key(seed), shape).astype(case.dtype)
    behind = np.concatenate([np.arange(rows)[::-1] for rows in ROWS_OF])
    ends = np.maximum(np.array(lengths)[owners] - behind, 0)
    where = paged.tables[owners], jnp.asarray(ends, jnp.int32)
    options, tokens = _options(case), paged.tables.shape[1] * page
    invariant = case.ways.get("batch_invariant", False)

    def run() -> Comparison:
        work = None
        if impl == "mosaic":
            how: Ways = {
                "heads": case.shape.heads,
                "owners": jnp.asarray(owners, jnp.int32),
                "window": options.window,
                "batch_invariant": invariant,
            }
            work = dispatch.decode_work(paged.k, where[1], tokens=tokens, **how)
        attend = jax.jit(partial(dispatch.paged_attention_decode, options=options, work=work, impl=impl))
        args = q, paged.k, paged.v, *where
        return _attention(case, attend(*args), reference.paged_attention_decode(*args, options), paged)

    return why_none(dispatch.DECODE, None, q, paged.k, paged.v, PLAIN), run


def _latent(case: Case, impl: Impl, seed: int) -> Prepared:
    """One row of each sequence or, with a size, the tile that ends it."""
    page, rank, tile = case.shape.page_size, case.shape.head_dim - POSITION, case.size
    lengths = np.array([1, page - 1, 0, page, page + 1, case.longest, 129])
    paged = checked(lengths.tolist(), case.shape, case.dtype, None, seed)
    places = (tile,) if tile else ()
    shape = len(lengths), *places, case.shape.heads, case.shape.head_dim
    q = jax.random.normal(jax.random.key(seed), shape).astype(case.dtype)
    new = np.minimum(lengths, tile)
    where = (lengths - new, new) if tile else (lengths,)
    args = paged.tables, *(jnp.asarray(x, jnp.int32) for x in where)
    table, kernel, truth = (
        (LATENT_PREFILL, latent_dispatch.latent_attention_prefill, reference.paged_attention_prefill)
        if tile
        else (LATENT_DECODE, latent_dispatch.latent_attention_decode, reference.paged_attention_decode)
    )
    real = np.arange(max(1, tile)) < np.maximum(new, not tile)[:, None]

    def run() -> Comparison:
        attend = jax.jit(partial(kernel, rank=rank, options=AttentionOptions(0.1), impl=impl))
        want = truth(q, paged.k, paged.k[..., :rank], *args, AttentionOptions(0.1))
        got, want = (x.reshape(*real.shape, *x.shape[-2:])[real] for x in (attend(q, paged.k, *args), want))
        return _attention(case, got, want, paged._replace(v=paged.k))

    return why_none(table, None, q, paged.k, PLAIN, rank), run


def _options(case: Case) -> AttentionOptions:
    """The case's ways as options of attention."""
    given = {name: value for name, value in case.ways.items() if name != "batch_invariant"}
    sinks = jnp.linspace(-1.0, 2.0, case.shape.heads) if "sinks" in given else None
    return AttentionOptions(**given | {"sinks": sinks})


def _prefill(case: Case, impl: Impl, seed: int) -> Prepared:
    """Tests a full first tile, a chunk that starts within a page, padding, two tiles of one token, and later
    tiles.

    The last two sequences share their first page.
    """
    page, tile = case.shape.page_size, case.size
    last = case.longest - tile
    positions, lengths = [0, page // 2 + 3, 0, page, 0, 2 * tile, last], [tile, tile - 5, 0, 1, 1, tile, tile]
    paged = checked(
        [at + length for at, length in zip(positions, lengths, strict=True)],
        case.shape,
        case.dtype,
        case.kind,
        seed,
    )
    q = jax.random.normal(
        jax.random.key(seed), (len(lengths), tile, case.shape.heads, case.shape.head_dim)
    ).astype(case.dtype)
    where = paged.tables, jnp.asarray(positions, jnp.int32), jnp.asarray(lengths, jnp.int32)
    real = jnp.arange(tile) < where[2][:, None]

    def run() -> Comparison:
        attend = jax.jit(partial(dispatch.paged_attention_prefill, options=_options(case), impl=impl))
        got = attend(q, paged.k, paged.v, *where)
        # other results are undefined, but must be finite
        got = jnp.where(real[..., None, None] | ~jnp.isfinite(got), got, 0)
        want = reference.paged_attention_prefill(q, paged.k, paged.v, *where, _options(case))
        return _attention(case, got, want, paged)

    return why_none(dispatch.PREFILL, None, q, paged.k, paged.v, PLAIN), run


def _attention(case: Case, got: jax.Array, want: reference.Float64, paged: Paged) -> Comparison:
    """Compares attention's results. The allowed error assumes that weights and results are rounded to dtype,
    and all else is float32.
    """
    largest = float(jnp.nanmax(jnp.abs(_numbers(paged.v))))
    rounding = 1.05 * float(jnp.finfo(case.dtype).eps) / 2
    return compare(got, want, rounding * (np.abs(want) + largest) + EXPONENTIALS * largest)


def _kv_write(case: Case, impl: Impl, seed: int) -> Prepared:
    rng, shape = np.random.default_rng(seed), case.shape
    num_pages = 2 + -(-case.size // shape.page_size)
    places = rng.permutation(np.arange(shape.page_size, num_pages * shape.page_size))[: case.size]
    real = np.arange(case.size) % 3 != 1
    places[~real] %= shape.page_size  # padding, in the null page
    new = rng.normal(size=(case.size, shape.kv_heads, shape.group + 2, shape.head_dim))
    norm = (
        HeadNorm(*(jnp.asarray(rng.normal(size=shape.head_dim), case.dtype) for _ in "qk"), 1e-6)
        if case.ways
        else None
    )
    qkv = QkvProduct(
        jnp.asarray(np.where(real[:, None, None, None], new, np.nan), case.dtype), shape.group, norm
    )
    angles = rng.uniform(-3, 3, size=(case.size, case.pairs))
    rotation = (
        (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
        if case.pairs
        else None
    )
    old = checked([0, 0], shape, case.dtype, case.kind, seed).k  # NaN
    old = jax.tree.map(lambda x: jnp.tile(x[:1], (num_pages, *[1] * (x.ndim - 1))), old)
    pages, offsets = places // shape.page_size, places % shape.page_size
    args = old, old, qkv, jnp.asarray(pages, jnp.int32), jnp.asarray(offsets, jnp.int32)
    untouched = np.ones((num_pages, shape.page_size), bool)
    untouched[pages[real], offsets[real]] = False
    untouched[0] = False  # undefined

    def run() -> Comparison:
        rows = {"rows": case.size // 2}
        got_q, got = jax.jit(partial(cache_dispatch.kv_write, impl=impl, **rows))(*args, rotation=rotation)
        want_q, want = _truth(reference.kv_write, **rows)(*args, rotation=rotation)
        q, wanted = (np.concatenate(parts).astype(np.float32)[real] for parts in (got_q, want_q))
        turned = compare(q, wanted, 1.01 * np.abs(wanted) * float(jnp.finfo(case.dtype).eps) + 1e-6)
        written = (
            _written(case, *both, (pages[real], slice(None), offsets[real]), untouched)
            for both in zip(got, want, strict=True)
        )
        return worst_of([turned, *written])

    return why_none(cache_dispatch.KV_WRITE, None, old, old, qkv), run


def _written(case: Case, got: Pages, want: Pages, places: Any, untouched: np.ndarray) -> Comparison:
    """What was copied is exact; what was normed, rotated or quantized may be rounded to the neighbour."""
    here, there = (np.asarray(_numbers(pages))[places] for pages in (got, want))
    step = (
        np.abs(there) * float(jnp.finfo(case.kind or case.dtype).eps)
        if case.kind != "int8"
        else np.abs(there).max(-1, keepdims=True) / 127
    )
    exact = case.kind is None and not case.pairs and not case.ways
    kept = [
        _same(now, then, untouched)
        for now, then in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    return worst_of([compare(here, there, np.zeros_like(there) if exact else 1.01 * step + 1e-6), *kept])


def _copy_pages(case: Case, impl: Impl, seed: int) -> Prepared:
    paged = checked([100, 0, 300, 7], case.shape, case.dtype, case.kind, seed)
    order = 1 + np.random.default_rng(seed).permutation(paged.k.shape[0] - 1)
    copies = min(5, len(order) // 2)
    sources, destinations = (
        jnp.asarray([*part, 0], jnp.int32) for part in (order[:copies], order[copies : 2 * copies])
    )
    args = paged.k, paged.v, sources, destinations
    all_but_null = np.arange(paged.k.shape[0]) > 0

    def run() -> Comparison:
        got, want = (
            jax.jit(partial(cache_dispatch.copy_pages, impl=impl))(*args),
            jax.jit(reference.copy_pages)(*args),
        )
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        return worst_of(_same(now, then, all_but_null) for now, then in pairs)

    return why_none(cache_dispatch.PAGE_COPY, None, paged.k, paged.v), run


CALLS: dict[str, Callable[[Case, Impl, int], Prepared]] = {
    "decode": _decode,
    "latent": _latent,
    "prefill": _prefill,
    "kv_write": _kv_write,
    "copy_pages": _copy_pages,
}


def _truth(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """The reference, with these arguments, in float32."""

    def run(*args: Any, **more: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return jax.jit(partial(function, **fixed), compiler_options=EXACTLY)(*args, **more)

    return run


def _wide(x: Any) -> Any:
    return x if isinstance(x, Quantized) else x.astype(jnp.float32)


def _numbers(pages: Pages) -> jax.Array:
    """The values of pages, in float32."""
    return (
        dequantize(replace(pages, dtype="float32"))
        if isinstance(pages, Quantized)
        else pages.astype(jnp.float32)
    )


def compare(got: Any, want: Any, allowed: np.ndarray) -> Comparison:
    """Compares arrays of the same shape. If the allowed error is 0, `worst` is 0 for equal elements and
    infinite for others.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.abs(got - want)
    with np.errstate(divide="ignore", invalid="ignore"):
        worst = np.where(error == 0, 0.0, error / allowed)
    norm = float(np.linalg.norm(want))
    relative = float(np.linalg.norm(error)) / norm if norm else float(np.linalg.norm(error))
    return Comparison(float(np.where(np.isnan(worst), np.inf, worst).max(initial=0.0)), relative)


def _same(got: jax.Array, want: jax.Array, where: np.ndarray) -> Comparison:
    """Compares arrays [pages, kv_heads, page_size, ...] bit by bit. where: a mask of [pages] or [pages,
    page_size].
    """
    now, then = (np.asarray(x) for x in (got, want))
    if where.ndim == 2:
        now, then = now.swapaxes(1, 2), then.swapaxes(1, 2)
    differ = (now[where].view(np.uint8) != then[where].view(np.uint8)).any()
    return Comparison(float("inf") if differ else 0.0, 0.0)


def worst_of(comparisons: Any) -> Comparison:
    return Comparison(*(max(values) for values in zip(*comparisons, strict=True)))
