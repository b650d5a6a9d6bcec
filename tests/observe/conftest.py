"""Fixtures for tests of records."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_new_callbacks() -> Iterator[None]:
    """Of the garbage collector, whose pauses an engine on a virtual clock notes for itself."""
    before = [*gc.callbacks]
    yield
    gc.callbacks[:] = before
