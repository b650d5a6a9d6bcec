"""What LLM.predict computes."""

from __future__ import annotations

from collections.abc import Sequence

from jengine.api.prompts import Prompt, listed
from jengine.base.checks import check_whole
from jengine.base.errors import InvalidArgument
from jengine.core.request import Request
from jengine.scheduling.forecasts.expectations import expect, hypothetical
from jengine.scheduling.forecasts.forecast import Prediction
from jengine.scheduling.scheduler import Scheduler


def prompts_or_lengths(
    prompts: Prompt | Sequence[Prompt], lengths: list[int], max_model_len: int
) -> list[Prompt]:
    """The prompts, or prompts of these lengths.

    Raises:
        InvalidArgument: both are given, or neither is; or a length is out of range.
    """
    given = [] if prompts == () else listed(prompts)
    if bool(lengths) == bool(given):
        limit = "either prompts or their lengths must be given"
        raise InvalidArgument("prompt_tokens", lengths[0] if len(lengths) == 1 else lengths, limit)
    for length in lengths:
        check_whole("prompt_tokens", length, 1, max_model_len - 1)
    return given or [[0] * length for length in lengths]


def predicted(scheduler: Scheduler, work: list[list[Request]], *, of_lengths: bool) -> list[Prediction]:
    """Predictions for requests, by prompt. Nothing is cached for those of which only the length is known."""
    new = [hypothetical(scheduler, requests[0], len(requests)) for requests in work]
    return expect(scheduler, [one._replace(cached=0) for one in new] if of_lengths else new)
