"""The maximum length of a sequence with learned positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jengine.base.errors import InvalidArgument
from jengine.engine.loop.engine import Engine


@pytest.mark.parametrize("variant", ["gpt2", "opt_125m", "opt_350m", "phi3_longrope_beyond"])
def test_beyond_the_positions_is_refused(variant: str, make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(
        InvalidArgument, match="max_model_len=257: must be at most 256, the model's number of positions"
    ):
        make_engine(variant, max_model_len=257)
