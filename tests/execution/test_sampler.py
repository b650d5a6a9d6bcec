"""The sampler: compared with an oracle in float64, its distribution, and the inputs of its random numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2  # a dependency of jax

from jengine.core.request import MAX_LOGPROBS, SamplingParams
from jengine.execution.logits import ALL_ALLOWED, mask_words
from jengine.execution.sampler import sample, sample_from_cdf, uniform, with_logprobs
from jengine.execution.sampling_row import pack_sampling, sampling_of
from jengine.execution.truncation import BLOCK, argmax, by_bits, by_digits, top_k, truncate
from jengine.scheduling.step_plan import SlotReset
from jengine.table.program_table import Variant
from tests.execution.oracle import Oracle, adjusted

ROWS, VOCAB = 8, 300  # no multiple of the block in which the distribution is inverted
PROMPT_LEN = 5
GREEDY = SamplingParams(temperature=0.0)


@functools.cache
def compiled(variant: Variant) -> object:
    extra = (
        (lambda: jnp.zeros((ROWS, VOCAB), jnp.int32), jnp.full((ROWS, mask_words(VOCAB)), ALL_ALLOWED))
        if variant == "full"
        else ()
    )
    return jax.jit(
        lambda logits, words, positions: sample(logits, sampling_of(words), positions, variant, *extra)
    )


@jax.jit
def uniforms(words: jax.Array, positions: jax.Array) -> jax.Array:
    return uniform(sampling_of(words), positions)


@jax.jit
def truncated(scaled: jax.Array, words: jax.Array) -> jax.Array:
    return truncate(scaled, sampling_of(words))


@dataclass
class Row:
    """A sampler row: the content of its slot, and the position of the sample."""

    params: SamplingParams
    seed: int = 1
    sample_index: int = 0
    position: int = PROMPT_LEN
    stops: tuple[int, ...] = ()

    def oracle(self, logits: np.ndarray) -> Oracle:
        early = self.position < PROMPT_LEN + self.params.min_tokens
        return Oracle(adjusted(logits, self.params, stops=self.stops if early else ()), self.params)

    @property
    def words(self) -> np.ndarray:
        return pack_sampling(SlotReset(1, self.params, self.seed, self.sample_index, PROMPT_LEN, self.stops))[
            1:
        ]


GREEDY_ROW = Row(GREEDY)


def stacked(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([row.words for row in rows]), np.array([row.position for row in rows], np.int32)


def tokens_of(logits: np.ndarray, rows: list[Row], variant: Variant = "truncated") -> list[int]:
    return np.asarray(compiled(variant)(logits, *stacked(rows))).tolist()  # type: ignore[operator]


LOGITS = {
    "normal": lambda rng: rng.normal(0, 1, VOCAB),
    "wide": lambda rng: rng.normal(0, 8, VOCAB),
    "peaked": lambda rng: np.where(np.arange(VOCAB) == rng.integers(VOCAB), 60.0, rng.normal(0, 1, VOCAB)),
    "ties": lambda rng: rng.integers(-3, 3, VOCAB).astype(np.float64),
    "equal": lambda rng: np.full(VOCAB, rng.normal()),
    "masked": lambda rng: np.where(rng.random(VOCAB) < 0.5, -np.inf, rng.normal(0, 2, VOCAB)),
    "far below": lambda rng: np.where(rng.random(VOCAB) < 0.9, -1e30, rng.normal(0, 2, VOCAB)),
}


def logits_for(kinds: list[str], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([LOGITS[kind](rng) for kind in kinds]).astype(np.float32)


def assert_like_oracle(logits: np.ndarray, rows: list[Row], tokens: list[int]) -> int:
    """Returns the number of rows for which only one token was possible."""
    draws, certain = np.asarray(uniforms(*stacked(rows)), np.float64), 0
    for scores, row, token, u in zip(logits, rows, tokens, draws, strict=True):
        expected = row.oracle(scores).possible(u)
        assert token in expected, (row, u)
        certain += len(expected) == 1
    return certain


ONE_AT_A_TIME = {
    "greedy": [{"temperature": 0.0}],
    "temperature": [{"temperature": t} for t in (1.0, 0.3, 2.5, 1e-3, 50.0)],
    "extreme temperature": [{"temperature": t} for t in (1e-30, 1e-44, 1e-300, 1e30, 3e38, 1e300)],
    "top_k": [{"top_k": k} for k in (1, 2, 40, VOCAB - 1, VOCAB, VOCAB + 1, 2**32 + 1, -1)],
    "top_p": [{"top_p": p} for p in (0.9, 0.5, 0.1, 0.999, 1e-6, 1e-30, 1e-44, 1e-300)],
    "min_p": [{"min_p": p} for p in (0.05, 0.5, 1.0, 1e-4, 1e-44, 1e-300)],
    "min_tokens": [{"min_tokens": n} for n in (1, 3, 10)],
    "greedy min_tokens": [{"temperature": 0.0, "min_tokens": n} for n in (1, 3, 10)],
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("values", ONE_AT_A_TIME.values(), ids=ONE_AT_A_TIME)
def test_each_parameter_alone(values: list[dict[str, float]], kind: str) -> None:
    rows = [
        Row(SamplingParams(**values[i % len(values)]), seed=i, position=PROMPT_LEN + i % 4)
        for i in range(ROWS * 4)
    ]  # type: ignore[arg-type]
    for start in range(0, len(rows), ROWS):
        some, logits = rows[start : start + ROWS], logits_for([kind] * ROWS, seed=start)
        for row, scores in zip(some, logits, strict=True):  # the likeliest are the ones that may not come
            row.stops = tuple(np.argsort(-scores)[:3].tolist())
        assert_like_oracle(logits, some, tokens_of(logits, some))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 1.3, 20.0]),
    top_k=st.sampled_from([0, 0, -1, 1, 2, 7, 50, 299, 300, 1000]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-9, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    max_tokens=st.just(8),
    min_tokens=st.sampled_from([0, 0, 4, 8]),
)
STOPS = st.lists(st.integers(0, VOCAB - 1), max_size=16, unique=True).map(tuple)
ROW = st.builds(
    Row,
    params=PARAMS,
    seed=st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 3),
    position=st.integers(PROMPT_LEN, PROMPT_LEN + 10),
    stops=STOPS,
)
BATCH = st.tuples(
    st.lists(ROW, min_size=ROWS, max_size=ROWS),
    st.lists(st.sampled_from(list(LOGITS)), min_size=ROWS, max_size=ROWS),
    st.integers(0, 2**32),
)


def test_random_combinations() -> None:
    certain, seen = 0, 0

    @settings(max_examples=120)
    @given(BATCH)
    def check(batch: tuple[list[Row], list[str], int]) -> None:
        nonlocal certain, seen
        rows, kinds, seed = batch
        logits = logits_for(kinds, seed)
        certain += assert_like_oracle(logits, rows, tokens_of(logits, rows))
        seen += len(rows)

    check()
    assert certain > 0.8 * seen, "the oracle allows so much that the test says little"


@settings(max_examples=120)
@given(BATCH)
def test_truncation_keeps_the_tokens_it_should(batch: tuple[list[Row], list[str], int]) -> None:
    rows, kinds, seed = batch
    logits = logits_for(kinds, seed)
    scaled = logits - logits.max(-1, keepdims=True)
    rows = [Row(_without_temperature(row.params)) for row in rows]
    got = np.isfinite(np.asarray(truncated(scaled, stacked(rows)[0]))) | np.isneginf(scaled)
    for i, row in enumerate(rows):
        oracle = row.oracle(scaled[i])
        kept, maybe = oracle.kept | np.isneginf(scaled[i]), oracle.maybe | np.isneginf(scaled[i])
        assert (kept <= got[i]).all() and (got[i] <= maybe).all()


def _without_temperature(p: SamplingParams) -> SamplingParams:
    return SamplingParams(top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)


@pytest.mark.parametrize("size", [1, 100, 128, 1000])
def test_the_largest_is_the_first_of_equals_and_never_padding(size: int) -> None:
    x = np.random.default_rng(size).integers(-3, 4, (6, size)).astype(np.float32)  # many ties
    x[0], x[1] = -np.inf, 7.0
    np.testing.assert_array_equal(jax.jit(argmax)(x), np.argmax(x, -1))
    x[2, size // 2], x[3] = np.nan, np.nan
    assert np.all(np.asarray(jax.jit(argmax)(x)) < size)


@pytest.mark.parametrize("size", [20, 300, 20 * BLOCK, 50 * BLOCK - 7])
def test_the_likeliest_are_those_of_a_sort_and_ties_keep_their_order(size: int) -> None:
    rng = np.random.default_rng(size)
    x = rng.normal(size=(6, size)).astype(np.float32)
    x[0], x[1], x[2] = -np.inf, 7.0, rng.integers(-3, 4, size)  # many ties
    x[3] = np.where(rng.random(size) < 5 / size, x[3], -np.inf)  # fewer numbers than are asked for
    for got, expected in zip(jax.jit(lambda x: top_k(x, 20))(x), jax.lax.top_k(x, 20), strict=True):
        np.testing.assert_array_equal(got, expected)


SEARCHES = {search.__name__: jax.jit(search) for search in (by_bits, by_digits)}


@pytest.mark.parametrize("search", SEARCHES)
@settings(max_examples=30)
@given(
    kinds=st.lists(st.sampled_from(list(LOGITS)), min_size=ROWS, max_size=ROWS),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_a_search_finds_the_largest_threshold(
    search: str, kinds: list[str], seed: int, data: st.DataObject
) -> None:
    """Counts are exact, so both find the k-th largest number."""
    x = logits_for(kinds, seed)
    k = np.array(data.draw(st.lists(st.integers(1, VOCAB + 3), min_size=ROWS, max_size=ROWS)))
    got = np.asarray(SEARCHES[search](x, np.float32(1), k.astype(np.float32)))
    expected = np.array(
        [np.sort(row)[-n] if n <= VOCAB else -np.inf for row, n in zip(x, k, strict=True)], np.float32
    )
    # processors may take less for 0
    np.testing.assert_array_equal(np.where(abs(got) <= np.finfo(np.float32).tiny, 0, got), expected)


def test_ties_at_a_threshold_are_all_kept() -> None:
    scaled = np.full((ROWS, VOCAB), -5.0, np.float32)
    scaled[:, :4], scaled[:, 4:7] = [0, -1, -1, -1], -2
    cases = {
        "top_k=1": 1,
        "top_k=2": 4,
        "top_k=4": 4,
        "top_k=5": 7,
        "min_p=0.37": 1,
        "min_p=0.36": 4,
        "min_p=0.13": 7,
    }
    cases |= {"top_p=0.22": 1, "top_p=0.23": 4, "top_p=0.46": 4, "top_p=0.48": 7}
    for text, count in cases.items():
        name, value = text.split("=")
        rows = [Row(SamplingParams(**{name: int(value) if name == "top_k" else float(value)}))] * ROWS  # type: ignore[arg-type]
        assert (
            np.isfinite(np.asarray(truncated(scaled, stacked(rows)[0]))).sum(-1).tolist() == [count] * ROWS
        ), text


@settings(max_examples=60)
@given(BATCH)
def test_a_row_does_not_depend_on_its_neighbours_or_its_place(
    batch: tuple[list[Row], list[str], int],
) -> None:
    rows, kinds, seed = batch
    logits = logits_for(kinds, seed)
    together = tokens_of(logits, rows)
    for i in range(ROWS):
        padding, nothing = [Row(GREEDY)] * ROWS, np.zeros_like(logits)
        place = (i + seed) % ROWS
        padding[place], nothing[place] = rows[i], logits[i]
        assert tokens_of(nothing, padding)[place] == together[i]


def test_each_variant_does_all_that_those_before_it_do() -> None:
    """A row's result does not change if another row needs a larger variant."""
    logits = logits_for(["normal", "wide"] * (ROWS // 2), 0)
    plain = [
        Row(SamplingParams(temperature=0.0 if i % 3 == 0 else 0.8), seed=i, stops=(3, 5)) for i in range(ROWS)
    ]
    greedy = [Row(GREEDY)] * ROWS
    assert tokens_of(logits, greedy, "greedy") == logits.argmax(-1).tolist()
    assert (
        tokens_of(logits, greedy, "greedy")
        == tokens_of(logits, greedy, "sample")
        == tokens_of(logits, greedy, "truncated")
        == tokens_of(logits, greedy, "full")
    )
    assert (
        tokens_of(logits, plain, "sample")
        == tokens_of(logits, plain, "truncated")
        == tokens_of(logits, plain, "full")
    )
    full = [Row(SamplingParams(top_k=9, top_p=0.8, min_tokens=2), seed=i, stops=(3, 5)) for i in range(ROWS)]
    assert tokens_of(logits, full, "truncated") == tokens_of(logits, full, "full")


@pytest.mark.parametrize("u", [0.0, 0.25, 0.5, 1 - 2**-24])
def test_a_draw_never_gives_a_token_without_mass(u: float) -> None:
    """The blocks before, between and after those with mass are empty, and so is most of each."""
    mass = np.zeros((3, VOCAB), np.float32)
    mass[0, [150, 250]] = 0.5
    mass[1, 299] = 1e-30
    mass[2, [0, 127, 128]] = [1, 1e-7, 1]
    got = np.asarray(sample_from_cdf(mass, np.full(3, u, np.float32), np.zeros(3, np.int32)))
    assert got.tolist() == [150 if u < 0.5 else 250, 299, 0 if u < 0.5 else 127 if u == 0.5 else 128]


@pytest.mark.parametrize("variant", ["greedy", "sample", "truncated", "full"])
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_of_nan_get_tokens_of_the_vocabulary_and_change_no_other_row(
    variant: Variant, sign: int
) -> None:
    """Nor do rows of infinite logits. An id beyond the vocabulary would name an image's embedding."""
    logits = logits_for(["normal"] * ROWS, 0)
    temperature = 0.0 if variant == "greedy" else 0.9
    rows = [
        Row(SamplingParams(temperature=temperature, top_k=9 if i % 2 else 0), seed=i) for i in range(ROWS)
    ]
    expected, bad = tokens_of(logits, rows, variant), {0: np.nan, 3: np.nan, 4: np.inf, 7: -np.inf}
    for row, value in bad.items():
        logits[row] = np.copysign(np.float32(value), sign) if np.isnan(value) else value
    got = tokens_of(logits, rows, variant)
    assert all(0 <= got[row] < VOCAB for row in bad)
    assert [got[row] for row in range(ROWS) if row not in bad] == [
        expected[row] for row in range(ROWS) if row not in bad
    ]


def test_a_mask_holds_for_rows_of_nan() -> None:
    """A grammar cannot go on with another token."""
    mask = np.zeros((ROWS, mask_words(VOCAB)), np.uint32)
    mask[:, 5] = 1 << 3  # token 163 alone
    words, positions = stacked([Row(SamplingParams(temperature=i % 2)) for i in range(ROWS)])
    counts = np.zeros((ROWS, VOCAB), np.int32)
    nan = np.full((ROWS, VOCAB), np.nan, np.float32)
    got = sample(
        nan,
        sampling_of(jnp.asarray(words)),
        positions,
        "full",
        lambda: jnp.asarray(counts),
        jnp.asarray(mask),
    )
    assert np.asarray(got).tolist() == [163] * ROWS


@pytest.mark.parametrize("sign", [1, -1])
def test_the_likeliest_of_nan_are_tokens_of_the_vocabulary(sign: int) -> None:
    size = BLOCK * MAX_LOGPROBS + 44  # more blocks than results, so that the last one, with padding, is seen
    x = np.full((2, size), np.copysign(np.float32(np.nan), sign))
    x[1] = np.arange(size)
    _, ids = top_k(jnp.asarray(x), MAX_LOGPROBS)
    assert (np.asarray(ids) < size).all() and np.asarray(ids)[1].tolist() == [
        size - 1 - i for i in range(MAX_LOGPROBS)
    ]


def test_min_tokens_holds_until_its_position() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, [7, 9]] = 50.0, 40.0
    rows = [
        Row(SamplingParams(min_tokens=4, temperature=i % 2), position=PROMPT_LEN + i, stops=(7,))
        for i in range(ROWS)
    ]
    assert tokens_of(logits, rows) == [9] * 4 + [7] * 4


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_for(["normal", "wide", "peaked", "far below"] * 2, 1)
    tokens = np.array([3, 299, 0, 17, 128, 5, 6, 7], np.int32)
    exact = logits.astype(np.float64)
    exact -= np.logaddexp.reduce(exact, -1, keepdims=True)
    got = jax.tree.map(np.asarray, jax.jit(with_logprobs)(logits, tokens))
    assert got.tokens.tolist() == tokens.tolist() and got.top_ids.shape == (ROWS, MAX_LOGPROBS)
    chosen = exact[np.arange(ROWS), tokens]
    np.testing.assert_allclose(got.logprobs, chosen, rtol=1e-6, atol=1e-5)
    assert got.ranks.tolist() == (1 + (logits > logits[np.arange(ROWS), tokens, None]).sum(-1)).tolist()
    for row in range(ROWS):
        assert len(set(got.top_ids[row].tolist())) == MAX_LOGPROBS
        np.testing.assert_allclose(
            got.top_logprobs[row], np.sort(exact[row])[::-1][:MAX_LOGPROBS], rtol=1e-6, atol=1e-5
        )
        np.testing.assert_allclose(exact[row, got.top_ids[row]], got.top_logprobs[row], rtol=1e-6, atol=1e-5)


# Randomness.

DRAWS = 8192


def draws(probabilities: np.ndarray, rows: list[Row]) -> np.ndarray:
    """DRAWS tokens of one distribution."""
    logits = np.broadcast_to(np.log(probabilities).astype(np.float32), (DRAWS, len(probabilities)))
    return np.array(tokens_of(logits, rows))


def assert_distributed(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square test, at a level at which a right sampler fails one time in a million."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    expected = (probabilities * len(tokens))[probabilities > 0]
    assert expected.min() > 5, "too few draws for the test to hold"
    statistic = ((counts[probabilities > 0] - expected) ** 2 / expected).sum()
    assert statistic < chi2.isf(1e-6, len(expected) - 1)


UNEVEN = np.array([0.3, 0.02, 0.1, 0.05, 0.2, 0.01, 0.02, 0.3])
SPREAD = np.tile(UNEVEN, 33)[:260] + 0.05
SPREAD /= SPREAD.sum()  # over three blocks


@pytest.mark.parametrize("vary", ["position", "seed", "high half of the seed", "sample_index"])
def test_distribution(vary: str) -> None:
    def row(i: int) -> Row:
        match vary:
            case "position":
                return Row(SamplingParams(), seed=11, position=i)
            case "seed":
                return Row(SamplingParams(), seed=i)
            case "sample_index":
                return Row(SamplingParams(), sample_index=i)
        return Row(SamplingParams(), seed=i << 32)

    tokens = draws(UNEVEN, [row(i) for i in range(DRAWS)])
    assert_distributed(tokens, UNEVEN)
    common = np.where(UNEVEN > 0.04, np.arange(len(UNEVEN)), 1)  # the rarest are counted as one
    merged = np.bincount(common, UNEVEN)
    pairs = common[tokens[::2]] * len(merged) + common[tokens[1::2]]
    assert_distributed(pairs, np.outer(merged, merged).reshape(-1))  # neighbours are independent


def test_distribution_over_a_larger_vocabulary() -> None:
    assert_distributed(draws(SPREAD, [Row(SamplingParams(), seed=i) for i in range(DRAWS)]), SPREAD)


@pytest.mark.parametrize(
    "params",
    [{"top_k": 3}, {"top_p": 0.75}, {"min_p": 0.2}, {"temperature": 2.0}, {"temperature": 0.5, "top_k": 4}],
)
def test_distribution_after_truncation(params: dict[str, float]) -> None:
    row = Row(SamplingParams(**params))  # type: ignore[arg-type]
    oracle = row.oracle(np.log(UNEVEN))
    assert_distributed(
        draws(UNEVEN, [Row(row.params, seed=i) for i in range(DRAWS)]), oracle.mass / oracle.mass.sum()
    )


def test_equal_inputs_repeat_and_each_input_matters() -> None:
    def number(seed: int = 5, sample_index: int = 0, position: int = 9) -> float:
        rows = [Row(SamplingParams(), seed, sample_index, position)] * ROWS
        got = set(np.asarray(uniforms(*stacked(rows))).tolist())
        assert len(got) == 1, "a row's place matters"
        return got.pop()

    base = {"seed": 5, "sample_index": 0, "position": 9}
    seeds = [6, 5 + 2**31, 5 + 2**32, 5 + 2**63, -5]
    others = [*({"seed": seed} for seed in seeds), {"sample_index": 1}, {"position": 10}]
    numbers = [number(**{**base, **other}) for other in others]
    assert number(**base) == number(**base)
    assert number(seed=-5) == number(seed=2**64 - 5)
    assert len({number(**base), *numbers}) == 1 + len(others)
    assert number(seed=9, position=5) != number(seed=5, position=9) != number(seed=5 << 32, position=9), (
        "inputs are mixed up"
    )
    assert all(0 <= n < 1 for n in numbers)


@pytest.mark.parametrize("option", [jax.enable_x64(True), jax.default_prng_impl("unsafe_rbg")])
def test_numbers_do_not_depend_on_the_options_of_the_process(option: Any) -> None:
    rows = stacked([Row(SamplingParams(), seed) for seed in range(ROWS)])
    expected = np.asarray(uniforms(*rows))
    with option:
        numbers = uniforms(*rows)
    assert numbers.dtype == np.float32 and (np.asarray(numbers) == expected).all()
