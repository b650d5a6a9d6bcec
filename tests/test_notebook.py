"""Notebooks run from top to bottom on the demo model, and are kept without their outputs."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICKSTART = ROOT / "notebooks" / "01_quickstart.ipynb"


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def install_cell() -> str:
    [cell] = [cell for cell in code_cells(QUICKSTART) if cell["id"] == "install"]
    return "".join(cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_cleared(path: Path) -> None:
    cells = code_cells(path)
    assert len(cells) > 5
    for cell in cells:
        assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {}), cell["source"]


@pytest.mark.parametrize(
    "source, gpu, wanted",
    [
        ("..", False, str(ROOT)),
        ("..", True, f"{ROOT}[cuda12]"),
        ("git+https://git.example/jengine", True, "jengine[cuda12] @ git+https://git.example/jengine"),
    ],
)
def test_the_install_cell_installs(source: str, gpu: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel without jengine, pip is asked for what it can find."""
    installed: list[list[str]] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: name if gpu else None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: installed.append(command))
    monkeypatch.chdir(QUICKSTART.parent)
    exec(install_cell().replace('source = ".."', f"source = {source!r}"), {})
    assert installed == [[sys.executable, "-m", "pip", "install", "--quiet", wanted, "matplotlib"]]


def test_the_install_cell_asks_for_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)  # as on Colab: a notebook without a checkout
    with pytest.raises(FileNotFoundError, match=r"^source='\.\.': set it to a checkout, a wheel or a git"):
        exec(install_cell(), {})


def test_quickstart_runs() -> None:
    notebook = nbformat.read(QUICKSTART, as_version=4)
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(QUICKSTART.parent)}}).execute()
    cells = {cell["id"]: cell["outputs"] for cell in notebook.cells if cell["cell_type"] == "code"}
    shown = {name: [output.get("data", {}) for output in outputs] for name, outputs in cells.items()}
    assert cells["install"] == []
    assert shown["load"][-1]["text/plain"].startswith("LLM('demo', ") and "text/html" in shown["load"][-1]
    assert sum("text/html" in data for data in shown["generate"]) == 3
    assert "def" in shown["chat"][-1]["text/html"]
    assert "image/png" in shown["plot"][-1]
    told = [output["text"] for outputs in cells.values() for output in outputs if output.get("name") == "stderr"]
    assert not [text for text in told if "IProgress" in text], "the kernel here has no ipywidgets, which is no reason to warn"
    assert shown["end"] == [{"text/plain": "0"}]
