"""A mock engine whose model stops after what it was told to say."""

from __future__ import annotations

from typing import Any

from jengine.serving.processes.engines import WarmEngine
from tests.mocks import mock_engine as mocks

END = "<END>"


def mock_engine(**options: Any) -> WarmEngine:
    """For mock_process. The options are those of MockEngine, and tokenizer_folder."""
    made = mocks.mock_engine(**options)
    made.info.sampling_defaults = {"stop": [END]}
    return made
