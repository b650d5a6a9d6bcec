"""Images as the scheduler knows them: which parts are encoded, in which rows of the pool, and for whom.

A part's embeddings are kept, by the request's cache_salt and by content, until their rows are needed. A
sequence may start when all embeddings that its prompt still needs are there, or will be before its step; it
holds their rows until its prompt is computed. Others are not delayed: a step has at most one encoder's
program before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

from jengine.core.images import VISUAL, ImagePart, PromptImages
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.step_plan import Encoding, Span


def mrope(tokens: List[int], grids: List[tuple[int, int]]) -> tuple[np.ndarray, int]:
    """Positions of a prompt's tokens, and what to add to the indices of the tokens that follow it.

    A text token has the same number three times. An image has one time, and its rows and columns count from
    there; text goes on after the largest number.

    Args:
        tokens: ids, with VISUAL at embedding rows.
        grids: height and width of each image's rows, in the order of the images.

    Returns:
        int32 [3, tokens], and the difference, 0 or less.
    """
    out = np.empty((3, len(tokens)), np.int32)
    images, visual = iter(grids), np.asarray(tokens, np.int64) == VISUAL
    at = position = 0
    while at < len(tokens):
        if visual[at]:
            height, width = next(images)
            end = at + height * width
            places = np.mgrid[:1, :height, :width].reshape(3, -1)
            out[:, at:end] = position + places
            position += max(height, width)
        else:
            later = np.flatnonzero(visual[at:])
            end = at + int(later[0]) if len(later) else len(tokens)
            out[:, at:end] = position + np.arange(end - at)
            position += end - at
        at = end
    return out, position - len(tokens)


def turned(images: PromptImages) -> tuple[np.ndarray, int]:
    """What the tokens of a prompt rotate with, less their indices: int32 [tokens, 3], up to the last
    embedding; and the same number of all tokens behind, three times.
    """
    count = images.positions[-1] + 1
    tokens = np.zeros(count, np.int64)
    tokens[images.positions] = VISUAL
    positions, after = mrope(tokens, [part.grid for part in images.parts])  # type: ignore[arg-type]
    return positions.T - np.arange(count, dtype=np.int32)[:, None], after


AHEAD = (
    64  # waiting sequences with images that are looked at before a step, so that a long queue costs little
)
Key = tuple[str | None, int]  # the salt, so that times do not reveal others' images; and the part's key


@dataclass(slots=True, eq=False)
class Embedded:
    """A part whose embeddings are in the pool, or will be before the next step.

    Attributes:
        rows: of the pool.
        users: running sequences that hold them.
        used: when they were last needed; larger is later.
        old: whether no other sequence may use them.
    """

    rows: list[int]
    users: int = 0
    used: int = 0
    old: bool = False


@dataclass(slots=True)
class Held:
    """The embeddings that a running sequence holds.

    Attributes:
        ids: for each embedding of its prompt, the id by which programs know it; 0: it is not needed.
    """

    parts: list[Embedded]
    ids: list[int] = field(default_factory=list)


class Images:
    """
    Args:
        rows: of the pool; 0: there are no images.
        vocab_size: ids from here on name the pool's rows.
        turns: whether positions have three numbers (mrope).
        ahead: whether a part's tokens see each other, so that a step computes all of them.
        prefix: whether all tokens of a prompt do (prefix-LM).
        embeddings: whether parts are embeddings that prompts give.

    Attributes:
        first: as vocab_size.
        prefix, embeddings: as above.
        encoded: number of parts that were encoded.
        reused: number of parts that were there when a sequence started to need them.
        planned: what to encode before the next step, if anything.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        *,
        turns: bool = False,
        ahead: bool = False,
        prefix: bool = False,
        embeddings: bool = False,
    ) -> None:
        self.rows, self.first, self._ahead = rows, vocab_size, ahead
        self.prefix, self.embeddings = prefix, embeddings
        self._parts: dict[Key, Embedded] = {}
        self._free = [*range(rows)][::-1]
        self._held: dict[Sequence, Held] = {}
        self._waiting = 0  # unfinished requests with images
        self._ready: set[Sequence] = set()
        self._turns: dict[Sequence, tuple[np.ndarray, int]] | None = {} if turns else None
        self.planned: Encoding | None = None
        self._new: set[Key] = set()  # parts that no sequence has used yet
        self._clock = count(1)
        self.encoded = self.reused = 0

    def came(self, sequence: Sequence) -> None:
        """A request was added."""
        self._waiting += sequence.images is not None
        if self.prefix:
            sequence.prefix, sequence.whole = True, ((0, sequence.prompt_len),)
        elif self._ahead and sequence.images is not None:
            sequence.whole = sequence.images.ranges

    def ended(self, sequence: Sequence) -> None:
        """A request has ended, and does not run."""
        self._waiting -= sequence.images is not None
        if self._turns is not None:
            self._turns.pop(sequence, None)

    def may_start(self, sequence: Sequence) -> bool:
        """Whether a sequence has the embeddings that it needs, as of the last call of `prepare`."""
        return sequence.images is None or sequence in self._ready

    def prepare(
        self,
        waiting: Iterable[Sequence],
        cached: Callable[[Sequence], int],
        buckets: tuple[int, ...],
        *,
        briefly: bool,
    ) -> None:
        """Decides which waiting sequences may start in the next step, and what to encode before it.

        Args:
            waiting: in the order in which they start.
            cached: the number of tokens that a sequence would not compute.
            buckets: patches of the encoder's programs that are ready, ascending.
            briefly: whether others wait for the step: it then gets no more than one part needs.
        """
        self._ready.clear()
        if not self._waiting:
            return
        needed, encoding, limit = set[Key](), Encoding(0), buckets[-1] if buckets else 0
        for sequence in islice((each for each in waiting if each.images is not None), AHEAD):
            assert sequence.images is not None
            whole = True
            for part in sequence.images.seen_from(cached(sequence)):
                key = _key(sequence, part)
                known = self._parts.get(key)
                if known is None and limit:
                    if briefly and not encoding.parts:
                        limit = next(bucket for bucket in buckets if bucket >= len(part.pixels))
                    if encoding.patches + len(part.pixels) <= limit:
                        known = self._make_room(key, part.rows, needed)
                        if known is not None:
                            encoding.add(part, known.rows)
                            self._new.add(key)
                    if known is None:
                        limit = 0  # parts are encoded in order
                if known is None:
                    whole = False
                    continue
                known.used = next(self._clock)
                needed.add(key)
            if whole:
                self._ready.add(sequence)
        if encoding.parts:
            encoding.bucket = next(bucket for bucket in buckets if bucket >= encoding.patches)
            self.encoded += len(encoding.parts)
            self.planned = encoding

    def take_encoding(self) -> Encoding | None:
        """What to encode before the next step, if anything."""
        planned, self.planned = self.planned, None
        return planned

    def hold(self, sequence: Sequence, start: int) -> bool:
        """A sequence starts its prompt here. False: embeddings that it needs are not there."""
        images = sequence.images
        if images is None:
            return True
        needed = {_key(sequence, part) for part in images.seen_from(start)}
        if not needed:
            return True
        if not needed <= self._parts.keys():
            self._ready.discard(sequence)
            return False
        held = Held([self._parts[key] for key in needed])
        for image in held.parts:
            image.users += 1
        for part in images.parts:
            there = (key := _key(sequence, part)) in needed
            rows = self._parts[key].rows if there else ()
            held.ids += [self.first + row for row in rows] if there else [0] * part.rows
        self.reused += len(needed - self._new)
        self._new -= needed
        self._held[sequence] = held
        return True

    def inputs(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """The ids of a sequence's known tokens [start, end), as programs read them."""
        tokens, held = sequence.tokens[start:end], self._held.get(sequence)
        if held is None or sequence.images is None:
            return tokens
        return sequence.images.placed(tokens, start, held.ids)

    def turn(self, spans: Iterable[Span], by_number: Mapping[int, Sequence]) -> None:
        """Tells spans what their tokens rotate with, if positions have three numbers."""
        if self._turns is None or not self._waiting:
            return
        for span in spans:
            sequence = by_number[span.seq].leader
            if sequence.images is None:
                continue
            if sequence not in self._turns:
                self._turns[sequence] = turned(sequence.images)
            turns, span.after = self._turns[sequence]
            if span.start < len(turns):
                span.turns = np.full((span.length, turns.shape[1]), span.after, np.int32)
                part = turns[span.start : span.start + span.length]
                span.turns[: len(part)] = part

    def forget(self, sequence: Sequence) -> None:
        """Frees the rows of a sequence whose prompt is computed, or that gives up its pages."""
        held = self._held.pop(sequence, None)
        if held is not None:
            for part in held.parts:
                part.users -= 1
                if part.old and not part.users:
                    self._free += part.rows

    def reset(self) -> None:
        """Forgets all embeddings, as of another encoder. Running sequences keep theirs."""
        assert self.planned is None, "an image that is planned is not encoded"
        for part in self._parts.values():
            part.old = True
            if not part.users:
                self._free += part.rows
        self._parts.clear()
        self._new.clear()
        self._ready.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every row is free or belongs to one part."""
        held = {id(part): part for images in self._held.values() for part in images.parts if part.old}
        owned = [row for part in [*self._parts.values(), *held.values()] for row in part.rows]
        assert sorted([*self._free, *owned]) == [*range(self.rows)], "a row of the pool is shared or lost"
        users = sum(len(held.parts) for held in self._held.values())
        parts = [*self._parts.values(), *held.values()]
        assert users == sum(part.users for part in parts), "users are miscounted"

    def _make_room(self, new: Key, rows: int, needed: set[Key]) -> Embedded | None:
        """Rows for a part, if need be of parts that were not used for longest and are not in `needed`."""
        idle = sorted(
            ((part.used, key) for key, part in self._parts.items() if not part.users and key not in needed),
            key=lambda pair: pair[0],
        )
        if len(self._free) + sum(len(self._parts[key].rows) for _, key in idle) < rows:
            return None
        for _, key in idle:
            if len(self._free) >= rows:
                break
            self._free += self._parts.pop(key).rows
            self._new.discard(key)
        self._parts[new] = Embedded([self._free.pop() for _ in range(rows)])
        needed.add(new)
        return self._parts[new]


def _key(sequence: Sequence, part: ImagePart) -> Key:
    return sequence.request.cache_salt, part.key
