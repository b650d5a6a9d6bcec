"""What a test does without an extra."""

from __future__ import annotations

import pytest

from tests.extras import INSTALLED, of_extra


@pytest.mark.parametrize("installed", ["", "dev", "aotx"])
def test_without_an_extra_a_test_is_skipped(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTALLED, installed)
    with pytest.raises(pytest.skip.Exception, match=r"needs the extra aot: pip install '\.\[aot\]'"):
        of_extra("aot", "no_such_module")


def test_where_an_extra_is_installed_a_missing_module_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTALLED, "dev,aot")
    assert of_extra("aot", "json").loads("1") == 1
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        of_extra("aot", "no_such_module")
