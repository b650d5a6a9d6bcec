"""What attention computes, as one value that goes from models through `dispatch` to every implementation."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial

import jax

WORDS = {"window": "window", "soft_cap": "soft cap", "sinks": "sinks", "slopes": "ALiBi"}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("sinks", "slopes"),
    meta_fields=("scale", "window", "soft_cap", "causal"),
)
@dataclass(frozen=True)
class AttentionOptions:
    """Options of causal attention, the same for all queries of a call.

    A tree of arrays: `jax.jit` takes it as an argument and compiles for each combination of the other fields.
    Functions that only decide what an implementation supports take any objects with shapes and dtypes instead
    of arrays.

    Attributes:
        scale: multiplies the scores, the products of queries and keys. Kernels take positive ones.
        window: a query at position p attends to keys in (p - window, p]; None: to all up to p.
        soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap); None: no cap.
        sinks: float32 [heads]; one additional score without a value in the softmax of each head, so weights
            may sum to less than 1. None: no sinks.
        slopes: float32 [heads], at least 0 (ALiBi, Press et al., 2022); its product with the distance from a
            query to a key is subtracted from the score, after any cap. None: no slopes.
        causal: whether no query sees later keys, even where others let the tokens of an image do so. Callers
            of kernels give no `until` then.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: jax.Array | None = None
    slopes: jax.Array | None = None
    causal: bool = False

    @property
    def static(self) -> AttentionOptions:
        """The options without arrays. They can be hashed, and be part of a kernel's form."""
        return replace(self, sinks=None, slopes=None)

    def refused(self, *taken: str) -> str | None:
        """Why an implementation that takes the scale and these options cannot serve these; None if it can."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("scale", "causal", *taken) and value is not None:
                option = f"{field.name}={value}" if isinstance(value, int | float) else field.name
                return f"{option}: the kernel has no {WORDS[field.name]}"
        return None

    def require(self, *taken: str) -> None:
        """
        Raises:
            ValueError: an option is set that is neither the scale nor one of these.
        """
        if (why := self.refused(*taken)) is not None:
            raise ValueError(why)


PLAIN = AttentionOptions(scale=1.0)  # for questions about arrays alone
