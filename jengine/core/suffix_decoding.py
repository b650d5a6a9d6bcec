"""Options of the method suffix in `speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from jengine.base.checks import check_number, check_whole

SHORTEST = 3  # tokens that must be equal
PREFIX = "suffix_decoding_"


@dataclass(frozen=True, slots=True)
class SuffixDecoding:
    """Names and defaults as in vLLM, without `suffix_decoding_`.

    Attributes:
        max_tree_depth: tokens that are compared at most.
        max_cached_requests: earlier outputs that are kept; 0: none.
        max_spec_factor: drafts at most, as a multiple of the number of equal tokens.
        min_token_prob: a draft ends where it becomes less probable.
    """

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The options' names."""
        return tuple(PREFIX + name for name in cls.__dataclass_fields__)

    @classmethod
    def of(cls, place: str, fields: Mapping[str, Any]) -> Self:
        """Reads the options among these fields.

        Raises:
            InvalidArgument: naming the field, in `place`, and its limit.
        """
        how = cls(**{name.removeprefix(PREFIX): fields[name] for name in cls.names() if name in fields})
        at = f"{place}.{PREFIX}"
        check_whole(f"{at}max_tree_depth", how.max_tree_depth, SHORTEST, None)
        check_whole(f"{at}max_cached_requests", how.max_cached_requests, 0, None)
        check_number(f"{at}max_spec_factor", how.max_spec_factor, 0.0, 1e9, "a number, at least 0")
        check_number(f"{at}min_token_prob", how.min_token_prob, 0.0, 1.0, "in [0, 1]")
        return how


AUTOMATIC = SuffixDecoding(max_spec_factor=5.0)  # costs decide how many drafts pay, however short the match
