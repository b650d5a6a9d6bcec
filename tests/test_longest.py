"""The lists of what takes longest, for the order of a run and for `make test-quick`."""

from __future__ import annotations

import pytest

from tests.conftest import COMPILING, LONGEST, ROOT, pytest_ignore_collect


def test_what_is_listed_exists() -> None:
    assert [name for name in (*LONGEST, *COMPILING) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("path", "quick", "left_out"),
    [
        (LONGEST[0], True, True),
        (LONGEST[0], False, None),
        (COMPILING[0], True, True),
        ("tests/scheduling", True, None),
    ],
)
def test_a_quick_run_leaves_out_what_is_listed(path: str, quick: bool, left_out: bool | None) -> None:
    class Config:
        def getoption(self, name: str) -> bool:
            return {"quick": quick}[name]

    assert pytest_ignore_collect(ROOT / path, Config()) is left_out  # type: ignore[arg-type]
