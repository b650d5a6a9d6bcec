"""What tests of programs share."""

from __future__ import annotations

import pytest

AS_SERVED = "test_gpu_samplers", "test_batch_invariance"  # what XLA makes of programs is what these are about


@pytest.fixture(scope="module", autouse=True)
def quick(request: pytest.FixtureRequest) -> None:
    """XLA optimizes programs little."""
    if request.module.__name__.rpartition(".")[-1] not in AS_SERVED:
        request.getfixturevalue("quickly")
