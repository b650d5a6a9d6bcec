"""The drafters that an engine's options ask for."""

from __future__ import annotations

from collections.abc import Sequence as List

from jengine.core.scheduling_options import SchedulingOptions
from jengine.core.speculation import Speculation
from jengine.scheduling.drafters.drafter import Draft, Drafter
from jengine.scheduling.drafters.forced import Forced
from jengine.scheduling.drafters.model import DraftModel
from jengine.scheduling.drafters.ngrams import Ngrams
from jengine.scheduling.drafters.suffix import Suffix
from jengine.scheduling.requests.sequence import Sequence


class FirstOf:
    """Asks several drafters, until one has a draft."""

    def __init__(self, drafters: List[Drafter]) -> None:
        self._drafters, self.most = drafters, max(drafter.most for drafter in drafters)

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter."""
        found = (drafter.draft(sequence, min(most, drafter.most)) for drafter in self._drafters)
        return next(filter(None, found), None)

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        for drafter in self._drafters:
            drafter.forget(sequence)


def drafter_of(options: SchedulingOptions) -> Drafter | None:
    """None: no speculation."""
    how = Speculation.of(options.speculative_config)
    if how is None:
        return None
    most = how.num_speculative_tokens
    if how.suffix is not None:
        return FirstOf([Forced(most), Suffix(how.suffix, most)])
    if how.on_device:
        return FirstOf([Forced(most), DraftModel(most)])
    return FirstOf([Forced(most), Ngrams(how.prompt_lookup_min, how.prompt_lookup_max, most)])
