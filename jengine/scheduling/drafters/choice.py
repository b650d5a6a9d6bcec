"""The drafter that an engine's options ask for."""

from __future__ import annotations

from jengine.core.scheduling_options import SchedulingOptions
from jengine.core.speculation import Speculation
from jengine.scheduling.drafters.drafter import Drafter
from jengine.scheduling.drafters.ngrams import Ngrams


def drafter_of(options: SchedulingOptions) -> Drafter | None:
    """None: no speculation."""
    how = Speculation.of(options.speculative_config)
    if how is None:
        return None
    return Ngrams(how.prompt_lookup_min, how.prompt_lookup_max, how.num_speculative_tokens)
