"""The plan of a step: plain data, all that execution gets from scheduling. Processes can send it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from jengine.core.images import ImagePart
from jengine.core.request import SamplingParams
from jengine.table.program_table import BurstKey, DraftKey, EncoderKey, SamplerKey, TrunkKey

if TYPE_CHECKING:
    import numpy as np

# Kernels read a sequence's pages once for all of its rows. The share of the first row's seconds that a
# further one needs, as measured on a CPU (benchmarks/results/rows_of_a_sequence.json).
FURTHER = 0.3


class Work(NamedTuple):
    """Counts without padding. If cache groups have windows, each count is the mean over groups, rounded down.

    Attributes:
        context: tokens that its decode rows attend to, summed over rows; for rows behind a sequence's first
            one, the share FURTHER of them.
        longest: the largest context of a single row.
        attended: (query, key) pairs of its tiles.
    """

    context: int = 0
    longest: int = 0
    attended: int = 0

    def plus(self, other: Work) -> Work:
        """The work of both in one step."""
        context, longest, attended = other
        return Work(self.context + context, max(self.longest, longest), self.attended + attended)


NO_WORK = Work()
Windows = Sequence[int | None]  # one for each cache group; None: no window


def rows_work(positions: Sequence[int], windows: Windows = (None,)) -> Work:
    """The work of decode rows at these positions. A row also attends to its own token."""
    if not positions:
        return NO_WORK
    last = max(positions)
    context = longest = 0
    for window in windows:
        if window is None or last < window:
            context += sum(positions) + len(positions)
            longest += last + 1
        else:
            context += sum([position + 1 if position < window else window for position in positions])
            longest += window
    return Work(context // len(windows), longest // len(windows))


def further_work(first: int, count: int, windows: Windows = (None,)) -> Work:
    """The work of `count` rows of one sequence from position `first` on, behind another row of it."""
    work = rows_work(range(first, first + count), windows)
    return work._replace(context=round(FURTHER * work.context))


def pairs(start: int, length: int, windows: Windows = (None,)) -> int:
    """Number of (query, key) pairs of `length` consecutive prompt tokens, the first at position `start`."""
    total = 0
    for window in windows:
        # queries that attend to all earlier tokens
        inside = length if window is None else min(max(window - start, 0), length)
        total += inside * start + inside * (inside + 1) // 2
        total += (length - inside) * (window or 0)
    return total // len(windows)


Tokens = list[int] | list[list[int]]  # a step's tokens by sample: one each, or lists of one or more


class Span(msgspec.Struct, gc=False):
    """Consecutive tokens of one sequence that a step computes.

    Attributes:
        seq: the sequence's number.
        start: position of the first token. A row that takes its token from its slot also takes its position
            from there; for it this is an upper bound, for pages and budgets, since steps in flight may yield
            fewer tokens than planned.
        length: number of tokens. In a burst, the number that the row reads: the first from the slot, the
            others from the burst.
        tokens: their ids, in tiles; None: the span lies on decode rows, one for each token. Its first token
            is `known` or, if that is -1, the one that the previous step left in the slot on the device.
        following: for a span of several rows, the ids of the tokens after the first; otherwise None. -2, -3
            and so on stand for the drafts of a draft model, in order, until the step is read.
        guesses: how many of its last tokens are drafts. Each row of such a span has a sample, and the samples
            count up to the first one that differs from the next draft.
        targets: the tokens that follow these, if their log probabilities were requested.
        pool: offset from which hidden states are summed, for an embedding; None: none are summed.
        known: for a span on rows, the first token's id if it is not in the slot, because it is a prompt's,
            the row repeats an earlier one, or the host chose it; otherwise -1.
        states: for a model with recurrent states, the page that the first tile reads, then the page that each
            tile writes and the next one reads. A row counts as one tile. Of several rows, only the last may
            write the page that the first one reads.
        turns: int32 [length, 3], of a model with mrope: the numbers that each token rotates with, less its
            position. None: `after`, three times.
        after: the same number of all tokens behind a prompt; 0 without images.
        ahead: int32 [length], for tiles of a model whose images' tokens see each other: how many tokens
            behind it each token sees. All of these are in the span. None: 0.
    """

    seq: int
    slot: int
    start: int
    length: int = 1
    tokens: list[int] | None = None
    targets: list[int] | None = None
    pool: int | None = None
    known: int = -1
    states: list[int] | None = None
    following: list[int] | None = None
    guesses: int = 0
    turns: np.ndarray | None = None
    after: int = 0
    ahead: np.ndarray | None = None


class Sample(msgspec.Struct, gc=False):
    """A token to sample after the token at `offset` of a span, into a sequence's slot. Several may follow one
    token. Those of a span with drafts follow each other.
    """

    span: int
    offset: int
    seq: int
    slot: int


@dataclass(slots=True)
class SlotReset:
    """Assigns a slot to a sequence: its sampling state is written there before the step runs."""

    slot: int
    params: SamplingParams
    seed: int  # the request's seed, or a random one
    sample_index: int
    prompt_len: int  # tokens, for min_tokens
    stop_token_ids: tuple[int, ...]  # including end-of-sequence ids, whether or not they end the request
    counted: list[int] | None = None  # all known tokens, if penalties need their counts
    lora: int = 0  # the place of its adapter, from 1; 0: none


@dataclass(slots=True)
class StepPlan:
    """A step, in order of execution: resets, block table entries, page copies; then the trunk; then the
    sampler.

    Attributes:
        spans: those whose token is on the device come first.
        samples: in the sampler's row order.
        table: (cache group, slot, index in the block table, page).
        copies: (pool, source page, target page).
        work: the part of its cost that does not depend on its programs.
        steps: number of decode steps in a burst. Spans are rows, and each takes part in the first `length`
            steps.
        prompts: number of spans of prompts or of other tokens that were known when their sequence was
            admitted. They follow those of decoding sequences: first on rows, then in tiles.
        rows: number of decode rows that hold tokens.
        guesses: number of drafts, over all spans.
        draft: the program of the draft model that runs before the trunk, if any.
        loras: (number of an adapter, place from 1) to write before the trunk; 0 empties a place.
        seconds: predicted device time; 0 if it was not requested. In a pipeline, that of one stage.
        overtakes: number of the last planned steps whose samples no row reads, in a pipeline.
    """

    trunk: TrunkKey
    sampler: SamplerKey
    spans: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    resets: list[SlotReset] = field(default_factory=list)
    table: list[tuple[int, int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    work: Work = NO_WORK
    steps: int = 1
    prompts: int = 0
    rows: int = 0
    guesses: int = 0
    draft: DraftKey | None = None
    loras: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0
    overtakes: int = 0

    @property
    def burst(self) -> BurstKey:
        """Key of the burst's program."""
        return BurstKey(self.trunk, self.sampler, self.steps)

    @property
    def drafting(self) -> list[Span]:
        """Spans whose drafts are still to be proposed on the device."""
        return [span for span in self.spans if span.guesses and span.following and span.following[0] < 0]


@dataclass(slots=True)
class Encoding:
    """Parts of images to encode before the step that was planned with them.

    Attributes:
        bucket: patches of the program.
        parts: with the rows of the pool that get their embeddings.
        patches: of all parts.
    """

    bucket: int
    parts: list[tuple[ImagePart, list[int]]] = field(default_factory=list)
    patches: int = 0

    def add(self, part: ImagePart, rows: list[int]) -> None:
        self.parts.append((part, rows))
        self.patches += len(part.pixels)

    @property
    def key(self) -> EncoderKey:
        return EncoderKey(self.bucket)


class Swaps(msgspec.Struct, gc=False):
    """Pages to move between device and host, in this order, before the step that was planned with them.

    Attributes:
        spills: (pool, page, host page) to copy to the host.
        fills: (pool, place, page): pages to fill from their staging places on the device.
        fetches: (host page, place) to stage from now on, in parallel with steps.
    """

    spills: list[tuple[int, int, int]] = []
    fills: list[tuple[int, int, int]] = []
    fetches: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self.spills or self.fills or self.fetches)
