"""Programs that a thread obtains while an engine serves."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jengine.execution.background import BackgroundPrograms
from jengine.parallel.link import Link


class Failing:
    """Programs that cannot be obtained."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __contains__(self, key: Any) -> bool:
        return False

    def obtain(self, keys: Sequence[Any], running: Any) -> Iterator[Any]:
        raise RuntimeError(self.message)
        yield


@pytest.mark.parametrize(
    ("message", "warned"),
    [
        ("no memory", True),
        ("/shutdown/programs: no space", True),
        ("cannot schedule new futures after shutdown", False),
    ],
)
def test_the_end_of_the_interpreter_is_no_failure(
    message: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    programs: Any = Failing(message)
    with caplog.at_level(logging.WARNING, "jengine"):
        background = BackgroundPrograms(programs, [1, 2], Link())
        assert not background.wait(60)
    assert ("2 programs could not be loaded or compiled" in caplog.text) == warned
