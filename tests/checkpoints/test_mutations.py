"""Changed files of models and adapters: an error that names the file, or a right answer, within seconds."""

from __future__ import annotations

import pytest

from tests.checkpoints.mutations import KINDS, run


@pytest.mark.parametrize("name", KINDS)
def test_changed_files_are_read_or_refused_by_name(name: str) -> None:
    found = run(KINDS[name], 40, seconds=120)
    assert found["refused"] and found.total() == 40


@pytest.mark.full
# tensorstore drops errors of reads that Orbax no longer awaits once another has failed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", KINDS)
def test_many_changed_files_are_read_or_refused_by_name(name: str) -> None:
    found = run(KINDS[name], 2000)
    assert found["read"] > 100 and found["refused"] > 100
