"""Fixtures for tests of records."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_new_callbacks() -> Iterator[None]:
    """Removes the garbage collector callbacks that a test added: engines on a virtual clock record pauses
    themselves.
    """
    before = [*gc.callbacks]
    yield
    gc.callbacks[:] = before
