"""The drafters that options ask for, and how often the drafts of each are right."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List
from types import MappingProxyType
from typing import NamedTuple

from jengine.core.scheduling_options import SchedulingOptions
from jengine.core.speculation import Speculation
from jengine.scheduling.drafters.drafter import Draft, Drafter, Places, agreed, continued
from jengine.scheduling.drafters.suffix import Suffix
from jengine.scheduling.requests.sequence import Sequence

# Shares of tokens that are assumed to be right before any were compared, after 0, 1, 2-3, 4-7, 8-15 and more
# tokens that agreed with the draft's source.
TEXT = (0.4, 0.4, 0.5, 0.65, 0.8, 0.9)


def drafters_of(options: SchedulingOptions) -> tuple[Drafter, ...]:
    """Empty: no speculation."""
    speculation = Speculation.of(options.speculative_config)
    if speculation is None:
        return ()
    max_drafts = speculation.num_speculative_tokens
    drafters: list[Drafter] = [Forced(max_drafts)]
    if speculation.on_device:
        drafters.append(DraftModel(max_drafts))
    if speculation.suffix is not None:
        drafters.append(Suffix(speculation.suffix, max_drafts))
    if speculation.prompt_lookup_min:
        drafters.append(Ngrams(speculation.prompt_lookup_min, speculation.prompt_lookup_max, max_drafts))
    return tuple(drafters)


class Ngrams(Drafter):
    """Looks for an earlier occurrence of a sequence's last tokens: the longest, and among equally long ones
    the latest. Proposes what followed there; if that reaches the sequence's end, it goes on with itself.

    Args:
        shortest, longest: number of tokens that must be equal, and that are compared at most.
        max_drafts: see Drafter.
    """

    def __init__(self, shortest: int, longest: int, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self._shortest, self._longest = shortest, longest
        self._known: dict[Sequence, Places] = {}

    def draft(self, sequence: Sequence, limit: int) -> Draft | None:
        tokens, best, length = sequence.tokens, 0, 0
        known = self._known.get(sequence)
        if known is None:
            known = self._known[sequence] = Places(self._shortest)
        for end in known.of_end(tokens):
            if (same := agreed(tokens, end, tokens, self._longest)) > length:
                best, length = end, same
        if not length:
            return None
        return Draft(continued(tokens, best, limit), length, "ngram")

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)


class Forced(Drafter):
    """Proposes the tokens that a request's mask expects. Wrong where the model spells the same text in other
    tokens.
    """

    def draft(self, sequence: Sequence, limit: int) -> Draft | None:
        mask = sequence.request.mask
        tokens = [] if mask is None else mask.forced()[:limit]
        return Draft(tokens, source="grammar") if tokens else None


class DraftModel(Drafter):
    """Asks for as many drafts as it may; see `Span.following`."""

    def draft(self, sequence: Sequence, limit: int) -> Draft | None:
        return Draft([*range(-2, -2 - limit, -1)], source="model")


PRIORS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"grammar": (0.9,) * len(TEXT), "model": (0.7,) * len(TEXT)}
)
PRIOR_WEIGHT = 8  # tokens that an assumption counts for
FADE = 1 / 128  # least weight of a newly compared token
RETURN = 1 / 512  # weight of the assumption, for each step that compares nothing


class Rates:
    """Shares of drafted tokens that were right, by the draft's source and the number of tokens before them
    that agreed. Older tokens count less and less.

    A draft's later tokens count as tokens after a longer agreement, since they matter only if the earlier
    ones are right. Without any agreement, all count alike.
    """

    def __init__(self) -> None:
        self._shares: dict[str, list[float]] = {}
        self._counts: dict[str, list[int]] = {}

    def note(self, source: str, agreed: int, right: bool) -> None:
        """Records whether a token after `agreed` ones was right."""
        shares, kind = self._of(source), _kind(agreed)
        counts = self._counts[source]
        counts[kind] += 1
        shares[kind] += (right - shares[kind]) * max(1 / (counts[kind] + PRIOR_WEIGHT), FADE)

    def miss(self, source: str) -> None:
        """A step has compared nothing of this source. So its shares slowly return to what was assumed: else a
        source that is compared only where it pays would never be tried again.
        """
        shares = self._of(source)
        for kind, assumed in enumerate(PRIORS.get(source, TEXT)):
            shares[kind] += (assumed - shares[kind]) * RETURN

    def chances(self, draft: Draft) -> list[float]:
        """For each token, the probability that it and all before it are right."""
        shares, chance, out = self._of(draft.source), 1.0, list[float]()
        for place in range(len(draft.tokens)):
            chance *= shares[_kind(draft.agreed and draft.agreed + place)]
            out.append(chance)
        return out

    def _of(self, source: str) -> list[float]:
        if source not in self._shares:
            self._shares[source], self._counts[source] = [*PRIORS.get(source, TEXT)], [0] * len(TEXT)
        return self._shares[source]


def _kind(agreed: int) -> int:
    return min(agreed.bit_length(), len(TEXT) - 1)


class BestDraft:
    """Asks several drafters, takes the draft of which most tokens should be right, and learns how often each
    drafter is right. Drafts of a draft model are made only where they are verified.

    Args:
        drafters: at least one. The first counts among equals.

    Attributes:
        max_drafts: maximum number of tokens that they propose for a sequence in a step.
        rates: how often drafts are right.
    """

    def __init__(self, drafters: List[Drafter]) -> None:
        self._drafters, self.rates = drafters, Rates()
        self.max_drafts = max(drafter.max_drafts for drafter in drafters)
        self._last: dict[Sequence, _Last] = {}

    def draft(self, sequence: Sequence) -> Draft | None:
        """The best draft. The answer is the same until new tokens are known."""
        length, last = len(sequence.tokens), self._last.get(sequence)
        if last is None or last.length != length:
            if last is not None:
                self._compare(last, sequence.tokens[last.length : last.length + self.max_drafts])
            proposals = [drafter.draft(sequence, drafter.max_drafts) for drafter in self._drafters]
            drafts = [draft for draft in proposals if draft is not None]
            self._last[sequence] = last = _Last(
                max(drafts, key=lambda draft: sum(self.rates.chances(draft)), default=None), drafts, length
            )
        return last.best

    def verified(self, sequence: Sequence, drafts: int, accepted: int) -> None:
        """Rows have verified so many of a sequence's drafts, before its new tokens are known."""
        last = self._last.get(sequence)
        if last is not None and last.best is not None and last.best.proposed:
            for count in range(min(accepted + 1, drafts)):
                self.rates.note(last.best.source, 0, count < accepted)

    def forget(self, sequence: Sequence) -> None:
        self._last.pop(sequence, None)
        for drafter in self._drafters:
            drafter.forget(sequence)

    def _compare(self, last: _Last, came: list[int]) -> None:
        for draft in last.drafts:
            if draft.proposed:
                continue
            for place, (token, drafted) in enumerate(zip(came, draft.tokens, strict=False)):
                self.rates.note(draft.source, draft.agreed and draft.agreed + place, token == drafted)
                if token != drafted:
                    break


class _Last(NamedTuple):
    """
    Attributes:
        best: the one of the drafts that was taken; None: there were none.
        drafts: one of each drafter that had one.
        length: number of the sequence's known tokens before them.
    """

    best: Draft | None
    drafts: list[Draft]
    length: int
