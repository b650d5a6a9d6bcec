"""A tokenizer that is ready for every kind of request."""

from __future__ import annotations

import contextlib
from pathlib import Path

from jengine import SamplingParams, StructuredOutputs, Tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's, prepared.

    Raises:
        ModelError: no tokenizer there, or one that cannot be read.
    """
    return prepared(Tokenizer.load(folder))


def prepared(tokenizer: Tokenizer) -> Tokenizer:
    """With llguidance's view of its vocabulary made: that would hold up the first request for structured output, and everybody else's
    tokens, for a second where the vocabulary is large."""
    from jengine import make_masks

    with contextlib.suppress(Exception):  # one that llguidance cannot take still serves other requests
        make_masks(SamplingParams(structured_outputs=StructuredOutputs(regex="a")), tokenizer, 1)
    return tokenizer
