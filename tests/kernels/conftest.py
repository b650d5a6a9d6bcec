"""What tests of kernels share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick(request: pytest.FixtureRequest) -> None:
    """XLA optimizes neither what it compiles around kernels nor references. A GPU's programs are what it
    makes of them.
    """
    if not request.module.__name__.endswith("test_ahead_of_time"):
        request.getfixturevalue("quickly")
