"""Loads tokenizers that are ready for every kind of request."""

from __future__ import annotations

import contextlib
from pathlib import Path

from jengine import SamplingParams, StructuredOutputs, Tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer, prepared.

    Raises:
        ModelError: there is no tokenizer, or it cannot be read.
    """
    return prepared(Tokenizer.load(folder))


def prepared(tokenizer: Tokenizer) -> Tokenizer:
    """Prepares llguidance's view of the vocabulary.

    For a large vocabulary this takes a second, which would delay the first request for structured output, and
    all others.
    """
    from jengine import make_masks

    with contextlib.suppress(Exception):  # a tokenizer that llguidance cannot use still serves other requests
        make_masks(SamplingParams(structured_outputs=StructuredOutputs(regex="a")), tokenizer, 1)
    return tokenizer
