"""A CPU's attention, called by XLA, against float64."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import dispatch
from pallas_kernels.attention.cpu import attention
from pallas_kernels.attention.cpu.attention import paged_attention_decode, paged_attention_prefill
from pallas_kernels.attention.cpu.blocks import BYTES
from pallas_kernels.attention.cpu.form import form
from pallas_kernels.attention.cpu.kernel import source
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.llvm import calls, native, team
from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.formats import processor
from pallas_kernels.llvm.math import power_of_two
from pallas_kernels.llvm.types import F32, I64, LANES, PTR, vector
from tests.kernels import reference
from tests.kernels.interpreted import Cache, cache, only_what_is_seen, options_of
from tests.kernels.test_attention_decode import BOTH, CAP, PLAIN, SINKS, WINDOW, Ways, eight_bits
from tests.kernels.test_masked import SETS, X86, runs_here

BEHIND = 0  # page that tables name behind windows


class Case(NamedTuple):
    head_dim: int
    kv_heads: int
    group: int
    page_size: int
    dtype: str
    kind: str | None
    ways: Ways


CASES = [
    Case(64, 4, 3, 16, "bfloat16", None, SINKS),
    pytest.param(Case(64, 4, 3, 16, "bfloat16", None, PLAIN), marks=pytest.mark.full),
    Case(128, 2, 4, 16, "bfloat16", None, BOTH),
    Case(24, 3, 2, 4, "float32", None, BOTH | {"slopes": True}),
    Case(64, 2, 4, 16, "bfloat16", "int8", SINKS | {"slopes": True}),
    pytest.param(Case(64, 2, 4, 16, "bfloat16", "int8", BOTH), marks=pytest.mark.full),
    Case(80, 1, 7, 24, "float32", "float8_e4m3fn", CAP),
    pytest.param(
        Case(24, 1, 5, 8, "float32", None, {"scale": 0.5, "soft_cap": 3.0, "sinks": True}),
        marks=pytest.mark.full,
    ),
    pytest.param(Case(256, 2, 1, 16, "bfloat16", None, WINDOW), marks=pytest.mark.full),
    pytest.param(Case(24, 1, 8, 32, "float32", "int8", WINDOW), marks=pytest.mark.full),
    pytest.param(Case(24, 2, 3, 16, "bfloat16", "float8_e4m3fn", PLAIN), marks=pytest.mark.full),
]
ANY = st.builds(
    Case,
    head_dim=st.sampled_from([8, 24, 40, 64, 80, 96, 128]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    page_size=st.sampled_from([8, 16, 20, 64]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    kind=st.sampled_from([None, "int8", "float8_e4m3fn"]),
    ways=st.sampled_from(
        [PLAIN, CAP, WINDOW, BOTH, SINKS, SINKS | {"slopes": True}, {"scale": 0.2, "window": 1}]
    ),
)


def pages(case: Case, oldest: Any, ends: Any) -> tuple[Cache, Cache, Cache]:
    """All that rows hold; with NaN for what none of a row's queries sees; the latter in float32, with zeros
    for NaN.
    """
    width = max(-(-max(ends) // case.page_size), 1)
    whole = cache(ends, width, case.kv_heads, case.page_size, case.head_dim, case.dtype, seed=case.group)
    seen = only_what_is_seen(whole, oldest, ends, case.ways.get("window"), behind=BEHIND)
    if case.kind is None:
        return whole, seen, seen.clean()
    return eight_bits(whole, case.kind)[0], *eight_bits(seen, case.kind)


def queries(case: Case, *shape: int) -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(7).normal(size=(*shape, case.kv_heads * case.group, case.head_dim)), case.dtype
    )


def assert_near(got: np.ndarray, want: np.ndarray, allowed: np.ndarray | float) -> None:
    assert (np.abs(got - want) <= allowed).all(), np.abs(got - want).max()  # false where got is NaN


def check_decode(case: Case, lengths: list[int]) -> None:
    whole, seen, clean = pages(case, np.array(lengths) - 1, lengths)
    q = queries(case, len(lengths))
    options = options_of(case.ways, q.shape[-2])
    run = jax.jit(partial(paged_attention_decode, options=options))
    got = np.asarray(run(q, *seen), np.float32)
    np.testing.assert_array_equal(got, np.asarray(run(q, *whole), np.float32))
    want = reference.paged_attention_decode(q, *clean, options)
    rounding = float(jnp.finfo(case.dtype).eps) / 2 if case.dtype == "bfloat16" else 0  # of the result alone
    empty = np.array(lengths) == 0
    assert_near(got[~empty], want[~empty], 1.01 * rounding * np.abs(want[~empty]) + 1e-5)
    assert not got[empty].any()


def check_prefill(
    case: Case, tile: int, positions: list[int], lengths: list[int], further: int | None = None
) -> None:
    """further: from the fourth query on, all see this many tokens behind the last real query; None: no query
    sees later ones.
    """
    ends = [position + length if length else 0 for position, length in zip(positions, lengths, strict=True)]
    at, until = np.array(positions)[:, None] + np.arange(tile), None
    if further is not None:
        ends = [end + further * (length > 3) for end, length in zip(ends, lengths, strict=True)]
        last = np.where(np.arange(tile) < 3, at, np.maximum(at, np.array(ends)[:, None] - 1))
        until = jnp.asarray(last, jnp.int32)
    whole, seen, clean = pages(case, positions, ends)
    where = jnp.array(positions, jnp.int32), jnp.array(lengths, jnp.int32)
    q = queries(case, len(lengths), tile)
    real = np.arange(tile) < np.array(lengths)[:, None]
    q = jnp.where(real[..., None, None], q, jnp.nan)
    options = options_of(case.ways, q.shape[-2])
    run = jax.jit(partial(paged_attention_prefill, options=options, until=until))
    got = np.asarray(run(q, *seen[:3], *where), np.float32)
    np.testing.assert_array_equal(got, np.asarray(run(q, *whole[:3], *where), np.float32))
    want = reference.paged_attention_prefill(q, *clean[:3], *where, options, until=until)
    # of each weight, and of the result
    rounding = float(jnp.finfo(case.dtype).eps) / 2 if case.dtype == "bfloat16" else 0
    assert_near(
        got[real], want[real], 1.05 * rounding * (np.abs(want[real]) + float(jnp.abs(clean.v).max())) + 1e-5
    )
    assert not got[~real].any()


@pytest.mark.parametrize("case", CASES)
def test_decode_meets_the_reference(case: Case) -> None:
    """Numbers and scales of tokens that no query sees are NaN; those behind its window change no bit."""
    check_decode(case, [1, case.page_size - 1, 0, case.page_size, case.page_size + 1, 320, 129])


@pytest.mark.parametrize("case", CASES)
def test_prefill_meets_the_reference(case: Case) -> None:
    """Padding queries are NaN too; their results are zeros."""
    check_prefill(case, 40, [0, case.page_size - 1, 0, 250, 64, 30], [40, 20, 0, 40, 1, 39])


def test_prompts_by_pairs_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on AMD's processors; Intel's have the instructions, too."""
    host = native.host()
    if not processor(host).pairs:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    if host.architecture == "x86":
        monkeypatch.setattr(native, "host", lambda: replace(host, cpu="znver4"))
    assert form(native.host(), "bfloat16", "bfloat16", 40, 16, 3, decode=False).pair_values
    check_prefill(Case(40, 2, 3, 16, "bfloat16", None, BOTH), 40, [0, 70, 0, 1], [40, 21, 0, 9])


@pytest.mark.parametrize("case", [one for one in CASES if isinstance(one, Case) and "slopes" not in one.ways])
def test_prefill_that_sees_later_tokens_meets_the_reference(case: Case) -> None:
    check_prefill(case, 40, [0, case.page_size - 1, 0, 250, 64, 30], [40, 20, 0, 40, 1, 39], further=37)


class Sequence(NamedTuple):
    """Consecutive decode rows of a sequence: the length that the first one sees, and their number."""

    length: int
    rows: int


ROWS, LONGEST = 24, 260
SEQUENCES = st.lists(st.builds(Sequence, st.integers(1, LONGEST - 12), st.integers(1, 12)), max_size=6)


def check_rows_of_sequences(case: Case, sequences: list[Sequence]) -> None:
    """Rows have the same bits in another order, in which each is computed alone."""
    # the last two share their first page
    sequences = [*sequences, Sequence(LONGEST - 11, 4), Sequence(LONGEST - 7, 8)]
    lengths = [one.length + one.rows - 1 for one in sequences]
    width = -(-LONGEST // case.page_size)
    paged = cache(lengths, width, case.kv_heads, case.page_size, case.head_dim, case.dtype, case.group)
    if case.kind is not None:
        paged = eight_bits(paged, case.kind)[0]
    owners = np.concatenate([np.full(one.rows, n) for n, one in enumerate(sequences)])[-ROWS:]
    seen = np.concatenate([one.length + np.arange(one.rows) for one in sequences])[-ROWS:]
    missing = ROWS - len(owners)
    tables = np.pad(np.asarray(paged.tables)[owners], ((missing // 2, missing - missing // 2), (0, 0)))
    seen = np.pad(seen, (missing // 2, missing - missing // 2)).astype(np.int32)
    q = queries(case, ROWS)
    run = jax.jit(partial(paged_attention_decode, options=options_of(case.ways, q.shape[-2])))
    together = run(q, paged.k, paged.v, tables, seen)
    alone = run(q[::-1], paged.k, paged.v, tables[::-1], seen[::-1])[::-1]
    np.testing.assert_array_equal(*(np.asarray(x, np.float32).view(np.int32) for x in (together, alone)))


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=10, deadline=None)
@given(SEQUENCES)
def test_rows_of_a_sequence_have_the_bits_of_single_rows(case: Case, sequences: list[Sequence]) -> None:
    check_rows_of_sequences(case, sequences)


def test_which_rows_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN that a row sees reach the rows that it is computed with, whose weights for them are 0."""
    monkeypatch.setattr(team, "parts", lambda: 1)  # as many as possible
    monkeypatch.setattr(attention, "register", lambda name, make: calls.register(f"{name}_of_1", make))
    jax.clear_caches()
    case = Case(16, 1, 2, 4, "float32", None, PLAIN)
    q = queries(case, 3)
    k = np.ones((30, 1, 4, 16), np.float32)

    def together(lengths: list[int], tables: list[list[int]], window: int | None = None) -> list[bool]:
        """Which rows are computed with the last one."""
        last, v = lengths[-1] - 1, k.copy()
        v[tables[-1][last // 4], 0, last % 4] = np.nan
        run = jax.jit(partial(paged_attention_decode, options=AttentionOptions(0.2, window=window)))
        got = run(q, k, v, np.array(tables, np.int32), np.array(lengths, np.int32))
        return [*np.isnan(np.asarray(got)).any((1, 2))]

    one, more, other = [1, 2, 3], [1, 2, 9], [8, 2, 3]
    assert together([7, 8, 9], [one, one, one]) == [True, True, True]
    assert together([6, 8, 9], [one, one, one]) == [False, True, True]
    assert together([8, 8, 9], [one, one, one]) == [False, True, True]
    assert together([9, 8, 9], [one, one, one])[1:] == [True, True]
    assert together([0, 1, 2], [one, one, one]) == [False, True, True]
    assert together([7, 8, 9], [one, one, more]) == [False, False, True]
    assert together([6, 7, 8], [one, one, more]) == [True, True, True]  # the ninth token is not theirs
    assert together([7, 8, 9], [other, one, one]) == [False, True, True]
    assert together([7, 8, 9], [other, one, one], window=3) == [True, True, True]  # behind all windows
    assert together([7, 8, 9], [other, one, one], window=4) == [False, True, True]


any_shape = settings(max_examples=60, deadline=None)  # each is compiled


@pytest.mark.full
@any_shape
@given(ANY, SEQUENCES)
def test_rows_of_a_sequence_of_any_shape(case: Case, sequences: list[Sequence]) -> None:
    check_rows_of_sequences(case, sequences)


@pytest.mark.full
@any_shape
@given(ANY, st.lists(st.integers(0, 200), min_size=3, max_size=3))
def test_decode_of_any_shape(case: Case, lengths: list[int]) -> None:
    check_decode(case, [*lengths, 1])


@pytest.mark.full
@any_shape
@given(
    ANY,
    st.integers(1, 70),
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 70)), min_size=3, max_size=3),
)
def test_prefill_of_any_shape(case: Case, tile: int, tiles: list[tuple[int, int]]) -> None:
    check_prefill(case, tile, [position for position, _ in tiles], [min(length, tile) for _, length in tiles])


def test_more_query_heads_than_rows_of_an_item() -> None:
    case = Case(8, 1, 100, 8, "float32", None, PLAIN)
    check_prefill(case, 3, [5, 0], [3, 2])
    check_decode(case, [9, 3])


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_bits_depend_on_no_other_row_on_no_tile_and_on_no_number_of_threads(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(64, 2, 3, 16, dtype, None, {"scale": 0.2, "window": 90})
    paged = cache([9, 230], 15, 2, 16, 64, dtype, seed=1)
    table, length = paged.tables[1:], 230
    q = queries(case, 1, length)

    def prefill(starts: list[int], tile: int) -> np.ndarray:
        missing = [max(0, start + tile - length) for start in starts]
        tiles = jnp.concatenate(
            [
                jnp.pad(q[:, start : start + tile], ((0, 0), (0, more), (0, 0), (0, 0)))
                for start, more in zip(starts, missing, strict=True)
            ]
        )
        lengths = jnp.array([min(tile, length - start) for start in starts], jnp.int32)
        run = jax.jit(partial(paged_attention_prefill, options=AttentionOptions(**case.ways)))
        got = run(
            tiles, paged.k, paged.v, jnp.repeat(table, len(starts), 0), jnp.array(starts, jnp.int32), lengths
        )
        return np.asarray(got, np.float32).reshape(-1, *q.shape[2:])[:length]

    def decode(rows: list[int]) -> np.ndarray:
        run = jax.jit(partial(paged_attention_decode, options=AttentionOptions(**case.ways)))
        got = run(
            q[0, jnp.array(rows)],
            paged.k,
            paged.v,
            jnp.repeat(table, len(rows), 0),
            jnp.array(rows, jnp.int32) + 1,
        )
        return np.asarray(got, np.float32)

    whole, some, alone = prefill([0], length), decode([3, 150, 229, 70]), decode([229])
    following = [*range(220, 230), *range(63, 68)]  # rows of two sequences
    np.testing.assert_array_equal(prefill(list(range(0, length, 32)), 32), whole)
    np.testing.assert_array_equal(prefill(list(range(0, length, 50)), 50), whole)
    np.testing.assert_array_equal(some[2:3], alone)
    together = decode(following)
    np.testing.assert_array_equal(together[9:10], alone)
    for count in 1, 5, 64, 512:
        monkeypatch.setattr(team, "parts", lambda count=count: count)
        monkeypatch.setattr(
            attention, "register", lambda name, make, count=count: calls.register(f"{name}_of_{count}", make)
        )
        jax.clear_caches()
        np.testing.assert_array_equal(prefill(list(range(0, length, 32)), 32), whole)
        np.testing.assert_array_equal(prefill([0], length), whole)
        np.testing.assert_array_equal(decode([3, 150, 229, 70]), some)
        np.testing.assert_array_equal(decode(following), together)


def test_a_cpu_takes_it() -> None:
    case = Case(16, 2, 2, 16, "float32", None, PLAIN)
    paged = cache([5, 20], 2, 2, 16, 16, "float32", seed=0)
    where = paged.tables, jnp.array([0, 16], jnp.int32), jnp.array([5, 4], jnp.int32)
    run = jax.jit(partial(dispatch.paged_attention_prefill, options=AttentionOptions(0.2)))
    compiled = run.lower(queries(case, 2, 8), paged.k, paged.v, *where).compile().as_text()
    assert "jengine_prefill" in compiled and "while" not in compiled


FORMS = [
    pytest.param(name, decode, marks=[pytest.mark.full] * (i % 2 == decode))
    for i, name in enumerate(SETS)
    for decode in (False, True)
]


@pytest.mark.parametrize(("name", "decode"), FORMS)  # in turn; the others are long tests
def test_no_instruction_is_compiled_that_a_processor_lacks(name: str, decode: bool) -> None:
    triple, features, plain, _, lacking = SETS[name]
    target = native.Target(triple, features=features)
    for stored, inputs in (("bfloat16", "bfloat16"), ("float32", "float32"), ("uint8", "bfloat16")):
        text = native.assembly(source(form(target, stored, inputs, 80, 16, 3, decode=decode)), target)
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith((".", "#", "//")))
        assert not re.search(lacking, code)
        called = re.findall(r"^\s*(?:bl|call\w*|movabsq)\s+\$?([a-z_]\w*)", code, re.MULTILINE)
        assert {*called} <= {"memset"}  # nothing of a library that may not be there
        assert stored != "bfloat16" or triple != X86 or re.search(plain, code)


@pytest.mark.parametrize(
    "name", ["avx2", *(pytest.param(name, marks=pytest.mark.full) for name in ("sse2", "avx512"))]
)
def test_results_without_features(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triple, features, *_ = SETS[name]
    target = native.Target(triple, features=features)
    if not runs_here(target):
        pytest.skip(f"this processor lacks {name}")
    monkeypatch.setattr(native, "host", lambda: target)
    monkeypatch.setattr(attention, "register", lambda known, make: calls.register(f"{known}_{name}", make))
    jax.clear_caches()
    check_decode(Case(40, 2, 3, 16, "bfloat16", None, BOTH), [1, 0, 100, 65])
    check_rows_of_sequences(Case(40, 2, 3, 16, "bfloat16", None, BOTH), [Sequence(60, 7)])
    check_prefill(Case(40, 2, 3, 16, "bfloat16", "int8", PLAIN), 40, [0, 70, 0, 1], [40, 21, 0, 9])


def test_powers_of_two() -> None:
    code = Code()
    source, count = code.function("powers", (PTR, I64), internal=False)
    for degree in 4, 6:
        with code.loop(0, count) as n:
            place = source + (count * (degree // 6) + n) * BYTES
            code.store(power_of_two(code, code.load(vector(F32), place), degree), place)
    (address,) = native.compiled(code.text, "powers")
    x = np.concatenate([np.linspace(-126, 126, LANES * 1000 - 8), np.arange(-3, 3), [-1e30, -127.0]]).astype(
        np.float32
    )
    got = np.concatenate([x, x])
    ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address)(got.ctypes.data, x.size // LANES)
    want = np.exp2(x.astype(np.float64))
    np.testing.assert_allclose(got[: x.size], want, rtol=8e-6, atol=1e-38)
    np.testing.assert_allclose(got[x.size :], want, rtol=2e-7, atol=1e-38)
    assert (got.reshape(2, -1)[:, -2:] == 0).all()
    assert (got.reshape(2, -1)[:, -8:-2] == [0.125, 0.25, 0.5, 1, 2, 4]).all()
