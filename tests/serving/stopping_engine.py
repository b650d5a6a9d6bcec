"""A mock engine whose model stops after what it was told to say."""

from __future__ import annotations

from typing import Any

from jengine.serving.processes import engines

END = "<END>"


def mock_engine(**options: Any) -> engines.WarmEngine:
    """For mock_process. The options are those of MockEngine, and tokenizer_folder."""
    made = engines.mock_engine(**options)
    made.info.sampling_defaults = {"stop": [END]}
    return made
