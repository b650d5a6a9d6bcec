"""The option `speculative_config`: how an engine drafts tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jengine.base.checks import check_whole
from jengine.base.errors import InvalidArgument

NAME = "speculative_config"
MOST_DRAFTS = 15  # of a sequence in a step
LOOKUP = 5  # default of both bounds, as in vLLM
AUTO, OFF = "auto", "none"


@dataclass(frozen=True, slots=True)
class Speculation:
    """A checked `speculative_config`. Names as in vLLM; num_speculative_tokens is a maximum."""

    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int

    @classmethod
    def of(cls, value: Mapping[str, Any] | str | None) -> Speculation | None:
        """Reads the option: auto, an object, or an object as JSON. Returns None for None and none.

        Raises:
            InvalidArgument: naming the field and its limit.
        """
        if value is None or value == OFF:
            return None
        if value == AUTO:  # costs decide how many drafts pay, so that short matches do no harm
            return cls(MOST_DRAFTS, 2, 16)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise InvalidArgument(NAME, value, f"must be {AUTO}, {OFF} or a JSON object") from None
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise InvalidArgument(NAME, value, f"must be {AUTO}, {OFF} or an object")
        fields = {key: given for key, given in value.items() if given is not None}
        method = fields.pop("method", None)
        if method != "ngram":
            raise InvalidArgument(f"{NAME}.method", method, "must be ngram")
        known = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
        for key in fields:
            if key not in known:
                raise InvalidArgument(f"{NAME}.{key}", fields[key], f"unknown; known: {', '.join(known)}")
        if "num_speculative_tokens" not in fields:
            raise InvalidArgument(f"{NAME}.num_speculative_tokens", None, "must be set")
        low, high = (fields.get(f"prompt_lookup_{end}") for end in ("min", "max"))
        low = next(given for given in (low, high, LOOKUP) if given is not None)
        high = low if high is None else high
        check_whole(f"{NAME}.num_speculative_tokens", fields["num_speculative_tokens"], 1, MOST_DRAFTS)
        check_whole(f"{NAME}.prompt_lookup_min", low, 1, None)
        check_whole(f"{NAME}.prompt_lookup_max", high, low, None)
        return cls(fields["num_speculative_tokens"], low, high)
