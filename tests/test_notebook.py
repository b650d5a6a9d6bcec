"""Notebooks run from top to bottom on the demo model, and are kept without their outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_cleared(path: Path) -> None:
    cells = code_cells(path)
    assert len(cells) > 5
    for cell in cells:
        assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {}), cell["source"]


def test_quickstart_runs() -> None:
    [path] = [path for path in NOTEBOOKS if path.name == "01_quickstart.ipynb"]
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(path.parent)}}).execute()
    cells = {cell["id"]: cell["outputs"] for cell in notebook.cells if cell["cell_type"] == "code"}
    shown = {name: [output.get("data", {}) for output in outputs] for name, outputs in cells.items()}
    assert cells["install"] == []
    assert shown["load"][-1]["text/plain"].startswith("LLM('demo', ") and "text/html" in shown["load"][-1]
    assert sum("text/html" in data for data in shown["generate"]) == 3
    assert "def" in shown["chat"][-1]["text/html"]
    assert "image/png" in shown["plot"][-1]
    assert shown["end"] == [{"text/plain": "0"}]
