"""Names of a module that are imported on first use."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from jengine.base.lazy_names import lazy_names


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`lazy`, whose stub lists a name of `home` and an alias. `home` notes whether garbage is collected."""
    (tmp_path / "home.py").write_text("import gc\n\ncollects = gc.isenabled()\nname = object()\n")
    (tmp_path / "lazy.pyi").write_text("from home import name as name\n\nalias = name\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "home", raising=False)
    lazy = ModuleType("lazy")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    listed, load, names = lazy_names(
        "lazy", str(tmp_path / "lazy.py"), lambda name: AttributeError(f"no {name}")
    )
    lazy.__dict__.update(__all__=listed, __getattr__=load, __dir__=names)
    return lazy


@pytest.mark.parametrize("collects", [True, False])
def test_names_are_imported_without_collecting_garbage(module: ModuleType, collects: bool) -> None:
    before = gc.isenabled()
    gc.enable() if collects else gc.disable()
    try:
        assert "home" not in sys.modules
        name = module.name
        assert gc.isenabled() is collects
    finally:
        gc.enable() if before else gc.disable()
    home = sys.modules["home"]
    assert name is home.name is module.alias and not home.collects
    assert module.__dict__["name"] is name, "it is found without __getattr__ from now on"


def test_what_is_there(module: ModuleType) -> None:
    assert module.__all__ == dir(module) == ["name"]
    with pytest.raises(AttributeError, match="no other"):
        module.other  # noqa: B018


@pytest.mark.parametrize(
    ("before", "old"), [("", True), ("gc.freeze()", False)], ids=["", "a user has frozen objects"]
)
def test_what_imports_make_is_old_for_collections(before: str, old: bool) -> None:
    code = f"""import gc; from jengine.base.process import uncollected; {before}
with uncollected(): made = []
assert any(made is one for one in gc.get_objects(generation=2)) == {old}
assert (gc.get_freeze_count() > 1000) != {old}"""
    subprocess.run([sys.executable, "-c", code], check=True)
