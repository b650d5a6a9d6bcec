"""The option `speculative_config`: how an engine drafts tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from jengine.base.errors import InvalidArgument
from jengine.base.options import check_options, check_whole, number, parse_object, whole

NAME = "speculative_config"
MOST_DRAFTS = 15  # of a sequence in a step
MOST_STATES = 7  # the same for models with recurrent states, of which each draft needs one
LOOKUP = 5  # default of both bounds, as in vLLM
AUTO, OFF = "auto", "none"
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

    max_tree_depth: Annotated[int, whole(SHORTEST)] = 24
    max_cached_requests: Annotated[int, whole(0)] = 10_000
    max_spec_factor: Annotated[float, number("a number, at least 0", 0.0, 1e9)] = 1.0
    min_token_prob: Annotated[float, number("in [0, 1]", 0.0, 1.0)] = 0.1

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
        options = cls(**{name.removeprefix(PREFIX): fields[name] for name in cls.names() if name in fields})
        check_options(options, f"{place}.{PREFIX}")
        return options


AUTOMATIC = SuffixDecoding(max_spec_factor=5.0)  # costs decide how many drafts pay, however short the match
METHODS = {  # and their options
    "ngram": ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    "suffix": ("num_speculative_tokens", *SuffixDecoding.names()),
    "draft_model": ("num_speculative_tokens", "model"),
    "mtp": ("num_speculative_tokens",),
    "eagle3": ("num_speculative_tokens", "model"),
}
MTP = (  # names that vLLM has for MTP heads of single families, and replaces by mtp
    "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Speculation:
    """A checked `speculative_config`. Names as in vLLM; num_speculative_tokens is a maximum.

    Attributes:
        prompt_lookup_min, prompt_lookup_max: options of n-grams; 0: there are none.
        suffix: options of suffix decoding; None: there is none.
        model: with methods draft_model and eagle3, the draft model or head; otherwise None.
        head: the method, if it is that of a head, which reads the model's hidden states; otherwise None.
    """

    num_speculative_tokens: int
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    suffix: SuffixDecoding | None = None
    model: str | None = None
    head: Literal["mtp", "eagle3"] | None = None

    @property
    def on_device(self) -> bool:
        """Whether drafts are made by layers that the device computes."""
        return self.model is not None or self.head is not None

    @classmethod
    def of(cls, value: Mapping[str, Any] | str | None) -> Speculation | None:
        """Reads the option: auto, an object, or an object as JSON. Returns None for None and none.

        Raises:
            InvalidArgument: naming the field and its limit.
        """
        if value is None or value == OFF:
            return None
        if value == AUTO:  # costs decide how many drafts pay, so that short matches do no harm
            return cls(MOST_DRAFTS, 2, 16, AUTOMATIC)
        fields = parse_object(NAME, value, words=f"{AUTO}, {OFF} or ")
        fields = {key: field for key, field in fields.items() if field is not None}
        if not fields and value == "null":
            return None
        method = fields.pop("method", None)
        method = "mtp" if method in MTP else method
        if method not in [*METHODS]:
            raise InvalidArgument(f"{NAME}.method", method, f"must be {' or '.join(METHODS)}")
        known = METHODS[method]
        for key in fields:
            if key not in known:
                raise InvalidArgument(f"{NAME}.{key}", fields[key], f"unknown; known: {', '.join(known)}")
        if method == "suffix":
            fields.setdefault("num_speculative_tokens", MOST_DRAFTS)
        if "num_speculative_tokens" not in fields:
            raise InvalidArgument(f"{NAME}.num_speculative_tokens", None, "must be set")
        check_whole(f"{NAME}.num_speculative_tokens", fields["num_speculative_tokens"], 1, MOST_DRAFTS)
        if method == "suffix":
            return cls(fields["num_speculative_tokens"], suffix=SuffixDecoding.of(NAME, fields))
        if method == "mtp":
            return cls(fields["num_speculative_tokens"], head="mtp")
        if method in ("draft_model", "eagle3"):
            model = fields.get("model")
            if not isinstance(model, str) or not model:
                what = "draft model" if method == "draft_model" else "head"
                raise InvalidArgument(f"{NAME}.model", model, f"must name the {what}, a folder or a repo id")
            head: Literal["eagle3"] | None = "eagle3" if method == "eagle3" else None
            return cls(fields["num_speculative_tokens"], model=model, head=head)
        low, high = (fields.get(f"prompt_lookup_{end}") for end in ("min", "max"))
        low = next(bound for bound in (low, high, LOOKUP) if bound is not None)
        high = low if high is None else high
        check_whole(f"{NAME}.prompt_lookup_min", low, 1, None)
        check_whole(f"{NAME}.prompt_lookup_max", high, low, None)
        return cls(fields["num_speculative_tokens"], low, high)
