"""The drafters that an engine's options ask for, and the simple ones: n-grams, grammars and draft models."""

from __future__ import annotations

from jengine.core.scheduling_options import SchedulingOptions
from jengine.core.speculation import Speculation
from jengine.scheduling.drafters.drafter import Draft, Drafter
from jengine.scheduling.drafters.places import Places, agreed, continued
from jengine.scheduling.drafters.suffix import Suffix
from jengine.scheduling.requests.sequence import Sequence


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


class Ngrams:
    """Looks for an earlier occurrence of a sequence's last tokens: the longest, and among equally long ones
    the latest. Proposes what followed there; if that reaches the sequence's end, it goes on with itself.

    Args:
        shortest, longest: number of tokens that must be equal, and that are compared at most.
        max_drafts: see Drafter.
    """

    def __init__(self, shortest: int, longest: int, max_drafts: int) -> None:
        self._shortest, self._longest, self.max_drafts = shortest, longest, max_drafts
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


class Forced:
    """Proposes the tokens that a request's mask expects. Wrong where the model spells the same text in other
    tokens.

    Args:
        max_drafts: see Drafter.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts

    def draft(self, sequence: Sequence, limit: int) -> Draft | None:
        mask = sequence.request.mask
        tokens = [] if mask is None else mask.forced()[:limit]
        return Draft(tokens, source="grammar") if tokens else None

    def forget(self, sequence: Sequence) -> None:
        """Remembers nothing."""


class DraftModel:
    """Asks for as many drafts as it may; see `Span.following`.

    Args:
        max_drafts: see Drafter.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts

    def draft(self, sequence: Sequence, limit: int) -> Draft | None:
        return Draft([*range(-2, -2 - limit, -1)], source="model")

    def forget(self, sequence: Sequence) -> None:
        """Remembers nothing."""
