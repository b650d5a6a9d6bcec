"""The typical seconds of a step, from the times at which results were read."""

from __future__ import annotations

import pytest

from jengine.engine.setup.measure import typical


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ([0.0, 3.0], 3.0),
        ([0.0, 1.0, 2.0, 3.0, 4.0], 1.0),
        ([0.0, 2.0, 2.0, 4.0, 4.0], 1.0),  # every other result was read late
        ([0.0, 1.0, 2.0, 3.0, 9.0], 1.0),  # one step was slow
    ],
)
def test_typical(times: list[float], seconds: float) -> None:
    assert typical(times) == seconds
