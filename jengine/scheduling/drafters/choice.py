"""The drafters that an engine's options ask for."""

from __future__ import annotations

from jengine.core.scheduling_options import SchedulingOptions
from jengine.core.speculation import Speculation
from jengine.scheduling.drafters.drafter import Drafter
from jengine.scheduling.drafters.forced import Forced
from jengine.scheduling.drafters.model import DraftModel
from jengine.scheduling.drafters.ngrams import Ngrams
from jengine.scheduling.drafters.suffix import Suffix


def drafters_of(options: SchedulingOptions) -> tuple[Drafter, ...]:
    """Empty: no speculation."""
    how = Speculation.of(options.speculative_config)
    if how is None:
        return ()
    most = how.num_speculative_tokens
    drafters: list[Drafter] = [Forced(most)]
    if how.on_device:
        drafters.append(DraftModel(most))
    if how.suffix is not None:
        drafters.append(Suffix(how.suffix, most))
    if how.prompt_lookup_min:
        drafters.append(Ngrams(how.prompt_lookup_min, how.prompt_lookup_max, most))
    return tuple(drafters)
