"""How often drafts are right."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jengine.scheduling.drafters.drafter import Draft

# Shares of tokens that are assumed to be right before any were compared, after 0, 1, 2-3, 4-7, 8-15 and more
# tokens that agreed with the draft's source.
TEXT = (0.4, 0.4, 0.5, 0.65, 0.8, 0.9)
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
