"""The compiled samplers: final hidden states to tokens. Each variant is a program. A CPU skips parts that no
row uses.

A row draws one uniform number and inverts the cumulative distribution. So no vocabulary-sized noise is
generated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jengine.core.request import MAX_LOGPROBS
from jengine.execution.logits import (
    add_bias,
    apply_mask,
    biasing,
    early_stops,
    masking,
    penalize,
    penalizing,
    suppress,
)
from jengine.execution.loras import Stacks
from jengine.execution.sampling_row import Sampling, sampling_of
from jengine.execution.truncation import BLOCK, argmax, either, if_any, top_k, truncate, truncating
from jengine.execution.trunk import Adapt, ToSample
from jengine.models import Model, Params
from jengine.parallel.collectives import all_gather, all_to_all, own_rows
from jengine.table.program_table import MOST_DRAFTS, Variant
from pallas_kernels.devices import traced_for_cpu


class Sampled(NamedTuple):
    """A step's tokens, by sampler row."""

    tokens: jax.Array  # int32 [rows]


class SampledLogprobs(NamedTuple):
    """Sampled tokens with log probabilities (natural logarithm); see EngineConfig.logprobs_mode."""

    tokens: jax.Array  # int32 [rows]
    logprobs: jax.Array  # float32 [rows], of the tokens
    ranks: jax.Array  # int32 [rows], from 1
    top_ids: jax.Array  # int32 [rows, MAX_LOGPROBS], most likely first
    top_logprobs: jax.Array  # float32 [rows, MAX_LOGPROBS]


def make_sampler(
    model: Model, variant: Variant, *, processed: bool = False, adapt: Adapt | None = None
) -> Callable[..., Any]:
    """The function to compile.

    (params, stacked adapters, SlotState.last, sampling words, to sample) -> (last, sampled); the full variant
    takes two more, counts int32 [slots, vocab] and a token mask uint32 [rows, mask_words], and gives ((last,
    counts), sampled).

    Args:
        processed: whether log probabilities are those of the distribution that tokens are drawn from, rather
            than of the raw logits.
        adapt: for an output head that adapters may change; otherwise the stacks are not used.
    """

    def sampler(
        params: Params, stacks: Stacks, last: jax.Array, words: jax.Array, to: ToSample
    ) -> tuple[jax.Array, Sampled]:
        params = params if adapt is None else adapt(params, stacks, words[to.slots])
        logits, local = _shared_out(model, params, to)
        sampled: Sampled = all_gather(
            Sampled(sample(logits, sampling_of(words[local.slots]), local.positions, variant)),
            to.slots.shape[0],
        )
        return _noted(last, to, sampled.tokens, accepted(to, sampled.tokens)), sampled

    def full(
        params: Params,
        stacks: Stacks,
        state: tuple[jax.Array, jax.Array],
        words: jax.Array,
        to: ToSample,
        mask: jax.Array,
    ) -> tuple[tuple[jax.Array, jax.Array], SampledLogprobs]:
        last, counts = state
        params = params if adapt is None else adapt(params, stacks, words[to.slots])
        logits, local = _shared_out(model, params, to)
        sampling = sampling_of(words[local.slots])
        greedy, scaled = _changed(
            logits,
            sampling,
            local.positions,
            "full",
            lambda: with_drafts(counts[local.slots], own_rows(drafts_before(to))),
            own_rows(mask),
            greedy_too=not processed,
        )
        tokens = _drawn(greedy, scaled, sampling, local.positions)
        sampled: SampledLogprobs = all_gather(
            with_wanted_logprobs(scaled if processed else logits, tokens, sampling), to.slots.shape[0]
        )
        count = accepted(to, sampled.tokens)
        counts = counts.at[jnp.where(count, to.slots, 0), sampled.tokens].add(2)
        return (_noted(last, to, sampled.tokens, count), counts), sampled

    return full if variant == "full" else sampler


def make_proposer(model: Model) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(params, SlotState.last, to sample) -> (last, tokens int32 [rows]): those that a draft model or head
    finds likeliest. Each slot has at most one row.
    """

    def propose(params: Params, last: jax.Array, to: ToSample) -> tuple[jax.Array, jax.Array]:
        logits, _ = _shared_out(model, params, to)
        tokens: jax.Array = all_gather(argmax(logits), to.slots.shape[0])
        if (head := model.head(params)) is not None:
            tokens = head.ids(tokens)
        return _noted(last, to, tokens, jnp.ones(tokens.shape, bool)), tokens

    return propose


def _noted(last: jax.Array, to: ToSample, tokens: jax.Array, count: jax.Array) -> jax.Array:
    """SlotState.last with the last token that counts of each slot, and its position.

    Args:
        tokens: int32 [rows].
        count: see `accepted`.
    """
    both = jnp.stack([tokens, to.positions], axis=1)
    if len(both) == 1:  # a scatter of one row would take more kernels
        return lax.dynamic_update_slice(last, both, (to.slots[0], 0))
    more = jnp.append((drafted(to) & count)[1:], False)
    return last.at[jnp.where(count & ~more, to.slots, 0)].set(both)


def drafted(to: ToSample) -> jax.Array:
    """Rows whose own token is a draft, bool [rows]: those that follow another row of their slot."""
    return (to.slots > 0) & (to.slots == jnp.roll(to.slots, 1)) & (jnp.arange(to.slots.shape[0]) > 0)


def accepted(to: ToSample, tokens: jax.Array) -> jax.Array:
    """Rows whose samples count, bool [rows]: all drafts of their slot up to theirs equal the sample before.

    Each row samples with the random number of its own position. So what counts is what would have been
    sampled without drafts.

    Args:
        tokens: the samples, int32 [rows].
    """
    wrong = drafted(to) & (to.tokens != jnp.roll(tokens, 1))
    # compared in pairs rather than in order: a single kernel on a GPU
    before = jnp.tril(to.slots[:, None] == to.slots)
    return ~(before & wrong).any(-1)


def drafts_before(to: ToSample) -> jax.Array:
    """Drafts that precede each row's sample, int32 [rows, n], padded with -1."""
    rows = jnp.arange(len(to.slots))
    # the last row up to each one that is no draft; compared in pairs, see `accepted`
    start = jnp.where(~drafted(to) & (rows <= rows[:, None]), rows, 0).max(-1, keepdims=True)
    before = rows[:, None] - jnp.arange(min(MOST_DRAFTS, len(rows) - 1))
    return jnp.where(before > start, to.tokens.at[before].get(mode="clip"), -1)


def with_drafts(counts: jax.Array, drafts: jax.Array) -> jax.Array:
    """Counts int32 [rows, vocab], see `penalize`, that include each row's drafts, int32 [rows, n]."""
    ids = jnp.where(drafts >= 0, drafts, counts.shape[1])
    return counts.at[jnp.arange(counts.shape[0])[:, None], ids].add(2, mode="drop")


def _shared_out(model: Model, params: Params, to: ToSample) -> tuple[jax.Array, ToSample]:
    """This device's share of the rows: logits [own rows, vocab], and the matching part of `to`."""
    return _rows(model.bind(params).logits(to.hidden), model), own_rows(to)


def _rows(logits: jax.Array, model: Model) -> jax.Array:
    """Logits of this device's rows over the vocabulary, from those of all rows over its part of it."""
    return all_to_all(logits)[:, : model.config.vocab_size]


def sample(
    logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    variant: Variant,
    counts: Callable[[], jax.Array] | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Samples tokens, int32 [rows], from float32 logits [rows, vocab] with each row's parameters.

    `mask` and `counts` are for `full`: see `apply_mask`, and `penalize` for the value that `counts` returns.
    """
    if variant == "greedy":
        return argmax(logits)
    if variant == "sample":
        greedy, scaled = _scaled(logits, sampling)
    else:
        greedy, scaled = _changed(logits, sampling, positions, variant, counts, mask)
    return _drawn(greedy, scaled, sampling, positions, always=variant == "sample")


def _drawn(
    greedy: jax.Array, scaled: jax.Array, sampling: Sampling, positions: jax.Array, *, always: bool = False
) -> jax.Array:
    """The tokens, given the most likely ones and unnormalized log probabilities. always: whether to draw even
    if all rows are greedy.
    """

    def drawn() -> jax.Array:
        return jnp.where(
            sampling.temperature == 0.0,
            greedy,
            sample_from_cdf(jnp.exp(scaled), uniform(sampling, positions), greedy),
        )

    return drawn() if always else either(sampling.temperature > 0, drawn, lambda: greedy)


def _changed(
    logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    variant: Variant,
    counts: Callable[[], jax.Array] | None,
    mask: jax.Array | None,
    *,
    greedy_too: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Applies the parameters to logits, then `_scaled`.

    Args:
        greedy_too: whether greedy rows may be truncated. They need not be.

    Rows share the branches. So a branch may only do exact operations to rows that do not need it; sums and
    exponentials follow.
    """
    stops = early_stops(sampling, positions)
    needed = truncating(sampling) | (stops >= 0).any(-1)
    if variant == "full":
        assert mask is not None and counts is not None
        seen = counts
        needed |= masking(mask) | biasing(sampling) | penalizing(sampling)

    def changed() -> tuple[jax.Array, jax.Array]:
        # copied here: otherwise XLA copies before the branch for the updates in place, even if no row needs
        # them
        x = jnp.copy(logits)
        if variant == "full":
            assert mask is not None
            x = if_any(masking(mask), lambda x: apply_mask(x, mask), x)
        x = if_any(stops >= 0, lambda x: suppress(x, stops), x)
        if variant == "full":
            x = if_any(biasing(sampling), lambda x: add_bias(x, sampling), x)
            x = if_any(penalizing(sampling), lambda x: penalize(x, sampling, seen()), x)
        greedy, scaled = _scaled(x, sampling)
        truncated = truncate(scaled, sampling)
        return greedy, truncated if greedy_too else jnp.where(
            (sampling.temperature == 0.0)[:, None], scaled, truncated
        )

    return either(needed, changed, lambda: _scaled(logits, sampling))


def _scaled(logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens, int32 [rows], and unnormalized log probabilities of all, [rows, vocab]."""
    # before the division: a small temperature cannot overflow
    scaled = logits - logits.max(-1, keepdims=True)
    scaled /= jnp.where(sampling.temperature == 0.0, 1.0, sampling.temperature)[:, None]
    return argmax(logits), scaled


def uniform(sampling: Sampling, positions: jax.Array) -> jax.Array:
    """Float32 [rows] in [0, 1), which depends only on a row's seed, sample index and position, and not on
    JAX's options.
    """

    words = (
        sampling.seed_high,
        sampling.seed_low,
        *(x.astype(jnp.uint32) for x in (sampling.sample_index, positions)),
    )

    def fold(keys: jax.Array, words: jax.Array) -> tuple[jax.Array, None]:
        return jax.vmap(jax.random.fold_in)(keys, words), None

    keys = jnp.broadcast_to(jax.random.key(0, impl="threefry2x32"), positions.shape)
    # on a CPU a loop compiles faster; on a GPU a loop would make XLA wait for the host
    keys, _ = lax.scan(fold, keys, jnp.stack(words), unroll=not traced_for_cpu())
    return jax.vmap(partial(jax.random.uniform, dtype=jnp.float32))(keys)


def sample_from_cdf(mass: jax.Array, u: jax.Array, otherwise: jax.Array) -> jax.Array:
    """The first token at which the cumulative mass exceeds u of the total: int32 [rows].

    Works in two levels, blocks and then tokens of one block, since a scan over a whole vocabulary is slow.
    Rounding may put the target at or above the last sum. Then the last token with mass is chosen, never one
    without. Rows of NaN have no token with mass; they get those of `otherwise`, int32 [rows].
    """
    rows, vocab = mass.shape
    blocks = jnp.pad(mass, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)
    sums = blocks.sum(-1)
    ends = jnp.cumsum(sums, -1)
    target = u * ends[:, -1]
    block = _first_over(ends, target, sums)
    row = jnp.arange(rows)
    inside = blocks[row, block]
    before = ends[row, block] - sums[row, block]
    token = _first_over(before[:, None] + jnp.cumsum(inside, -1), target, inside)
    drawn = (block * BLOCK + token).astype(jnp.int32)
    return jnp.where(jnp.isfinite(ends[:, -1]), drawn, otherwise)


def _first_over(ends: jax.Array, target: jax.Array, mass: jax.Array) -> jax.Array:
    over = (ends > target[:, None]) & (mass > 0)
    last = mass.shape[-1] - 1 - jnp.argmax(jnp.flip(mass > 0, -1), -1)
    return jnp.where(over.any(-1), jnp.argmax(over, -1), last)


def with_wanted_logprobs(logits: jax.Array, tokens: jax.Array, sampling: Sampling) -> SampledLogprobs:
    """`with_logprobs`, or zeros if no row requests them."""
    rows, count = logits.shape[0], _most_logprobs(logits)

    def none() -> SampledLogprobs:
        zeros = jnp.zeros(rows, jnp.int32)
        return SampledLogprobs(
            tokens,
            zeros.astype(jnp.float32),
            zeros,
            jnp.zeros((rows, count), jnp.int32),
            jnp.zeros((rows, count)),
        )

    return either(sampling.logprobs > 0, lambda: with_logprobs(logits, tokens, sampling.logprobs > 1), none)


def with_logprobs(logits: jax.Array, tokens: jax.Array, top: jax.Array | None = None) -> SampledLogprobs:
    """Log probabilities of logits. Includes the most likely tokens if any of `top` is set or None."""
    count = _most_logprobs(logits)
    logprobs = jax.nn.log_softmax(logits, -1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], -1)
    ranks = 1 + jnp.sum(logprobs > chosen, -1)

    def likeliest() -> tuple[jax.Array, jax.Array]:
        return top_k(logprobs, count)

    def none() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((logits.shape[0], count), logprobs.dtype), jnp.zeros(
            (logits.shape[0], count), jnp.int32
        )

    values, ids = likeliest() if top is None else either(top, likeliest, none)
    return SampledLogprobs(tokens, chosen[:, 0], ranks.astype(jnp.int32), ids, values)


def _most_logprobs(logits: jax.Array) -> int:
    return min(MAX_LOGPROBS, logits.shape[-1])


def make_scorer(model: Model, tile_size: int, adapt: Adapt | None = None) -> Callable[..., SampledLogprobs]:
    """The function to compile: (params, stacked adapters, sampling words, hidden [tokens, hidden_size],
    targets int32 [tokens] and the slots of tiles int32 [tiles]) -> log probabilities of the targets.

    Works tile by tile: the logits of a whole prompt would take gigabytes.

    Args:
        adapt: for an output head that adapters may change; otherwise the stacks are not used.
    """

    def score(
        params: Params, stacks: Stacks, words: jax.Array, hidden: jax.Array, packed: jax.Array
    ) -> SampledLogprobs:
        def one(tile: tuple[jax.Array, jax.Array, jax.Array]) -> SampledLogprobs:
            hidden, targets, slot = tile
            adapted = params if adapt is None else adapt(params, stacks, words[jnp.full(tile_size, slot)])
            logits = model.bind(adapted).logits(hidden)
            scores: SampledLogprobs = all_gather(
                with_logprobs(_rows(logits, model), own_rows(targets)), tile_size
            )
            return scores

        targets, slots = packed[: len(hidden)], packed[len(hidden) :]
        tiles = hidden.reshape(-1, tile_size, hidden.shape[-1]), targets.reshape(-1, tile_size), slots
        scores: SampledLogprobs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), lax.map(one, tiles))
        return scores

    return score
