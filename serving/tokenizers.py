"""A tokenizer that is ready for every kind of request."""

from __future__ import annotations

import contextlib
from pathlib import Path

from jengine import SamplingParams, StructuredOutputs, Tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's, with llguidance's view of its vocabulary made: that would hold up the first request for structured output, and
    everybody else's tokens, for a second where the vocabulary is large.

    Raises:
        ModelError: no tokenizer there, or one that cannot be read.
    """
    from jengine import make_masks

    tokenizer = Tokenizer.load(folder)
    with contextlib.suppress(Exception):  # one that llguidance cannot take still serves other requests
        make_masks(SamplingParams(structured_outputs=StructuredOutputs(regex="a")), tokenizer, 1)
    return tokenizer
