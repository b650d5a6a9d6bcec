"""Notebooks run from top to bottom on the demo model, and are kept without their outputs."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.compiling import FEW_OPTIMIZATIONS
from tests.extras import of_extra
from tests.golden.families.smolvlm import VARIANTS
from tests.golden.images import write_image_model

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICKSTART = ROOT / "notebooks" / "01_quickstart.ipynb"
EXTRAS = '    extras = "[cuda12]" if shutil.which("nvidia-smi") else ""\n'
COMPILERS = '    extras = "[aot]"  # the compiler for GPUs that need not be there\n'

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def install_cell(path: Path) -> str:
    [cell] = [cell for cell in code_cells(path) if cell["id"] == "install"]
    return "".join(cell["source"])


def run(
    path: Path, *, optimized: bool = False, timeout: int = 280, **variables: str
) -> dict[str, list[dict[str, Any]]]:
    """Each code cell's outputs.

    Args:
        variables: of the kernel's environment.
        optimized: XLA compiles with all optimizations.
        timeout: seconds for each cell.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(path.parent)}})
    client.execute(env={**os.environ, FEW_OPTIMIZATIONS: "0" if optimized else "1", **variables})
    return {cell["id"]: cell["outputs"] for cell in notebook.cells if cell["cell_type"] == "code"}


def data_of(cells: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [output.get("data", {}) for output in outputs] for name, outputs in cells.items()}


def printed(outputs: list[dict[str, Any]]) -> str:
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


@each_notebook
def test_outputs_are_cleared(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))
    cells = code_cells(path)
    assert len(cells) > 5
    for cell in cells:
        assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {}), cell["source"]
        compile("".join(cell["source"]), cell["id"], "exec")
    assert cells[0]["id"] == "install"


@each_notebook
def test_names_that_are_imported_exist(path: Path) -> None:
    """Some notebooks run in long tests only."""
    for cell in code_cells(path):
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.Import):
                for name in node.names:
                    importlib.import_module(name.name)
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert hasattr(module, name.name) or importlib.util.find_spec(
                        f"{node.module}.{name.name}"
                    ), name.name


@each_notebook
def test_the_install_cell_is_the_quickstarts(path: Path) -> None:
    cell, quickstart = install_cell(path), install_cell(QUICKSTART)
    assert cell == (quickstart.replace(EXTRAS, COMPILERS) if path.name == "04_kernels.ipynb" else quickstart)


@pytest.mark.parametrize(
    "source, gpu, wanted",
    [
        ("..", False, str(ROOT)),
        ("..", True, f"{ROOT}[cuda12]"),
        ("git+https://git.example/jengine", True, "jengine[cuda12] @ git+https://git.example/jengine"),
        ("jengine", False, "jengine"),
        ("jengine==0.5.0", True, "jengine[cuda12]==0.5.0"),
        ("jengine-9.whl", True, str(ROOT / "notebooks" / "jengine-9.whl[cuda12]")),
    ],
)
def test_the_install_cell_installs(
    source: str, gpu: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a kernel without jengine, the cell installs it with pip, from a source that exists."""
    installed: list[list[str]] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: name if gpu else None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: installed.append(command))
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: path.suffix == ".whl" or is_file(path))
    monkeypatch.chdir(QUICKSTART.parent)
    exec(install_cell(QUICKSTART).replace('source = ".."', f"source = {source!r}"), {})
    assert installed == [[sys.executable, "-m", "pip", "install", "--quiet", wanted, "matplotlib"]]


def test_the_install_cell_asks_for_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)  # as on Colab: a notebook without a checkout
    with pytest.raises(FileNotFoundError, match=r"^source='\.\.': set it to a checkout, a wheel, a git"):
        exec(install_cell(QUICKSTART), {})


def test_quickstart_runs() -> None:
    cells = run(QUICKSTART)
    shown = data_of(cells)
    assert cells["install"] == []
    assert shown["load"][-1]["text/plain"].startswith("LLM('demo', ") and "text/html" in shown["load"][-1]
    assert sum("text/html" in data for data in shown["generate"]) == 3
    assert "def" in shown["chat"][-1]["text/html"]
    assert "image/png" in shown["plot"][-1]
    told = [
        output["text"] for outputs in cells.values() for output in outputs if output.get("name") == "stderr"
    ]
    assert not [text for text in told if "IProgress" in text], (
        "the kernel here has no ipywidgets, which is no reason to warn"
    )
    assert shown["end"] == [{"text/plain": "0"}]


@pytest.mark.full
def test_batching_runs() -> None:
    cells = run(ROOT / "notebooks" / "02_batching.ipynb")
    shown = data_of(cells)
    assert "data:image/png" in shown["trace"][-1]["text/html"]
    for name in ("gantt", "padding", "map", "prefix"):
        assert "image/png" in shown[name][0], name
    found, _, prompts = printed(cells["prefix"]).partition(" of ")
    assert int(found) > 0.5 * int(prompts.split()[0])
    assert shown["end"] == [{"text/plain": "0"}]


@pytest.mark.full
def test_costs_runs() -> None:
    cells = run(ROOT / "notebooks" / "03_costs.ipynb")
    shown = data_of(cells)
    assert "image/png" in shown["scatter"][0] and "image/png" in shown["engines"][0]
    assert "bound by" in shown["explain"][0]["text/html"]
    assert "targets: first token within" in printed(cells["targets"])
    assert "needed for" in printed(cells["fleet"])


@pytest.mark.full
def test_kernels_runs() -> None:
    of_extra("aot", "jax_plugins.xla_cuda13")
    cells = run(ROOT / "notebooks" / "04_kernels.ipynb")
    race = printed(cells["race"])
    assert "it waits: right" in race and "a read in line" in race and "shared[...] = shared[...] * 2" in race
    assert printed(cells["kernel"]).startswith("no race")
    assert printed(cells["compile"]).count("compiled in") == 3
    assert "It fits." in data_of(cells)["plan"][0]["text/html"]


@pytest.mark.full
def test_your_model_runs() -> None:
    cells = run(ROOT / "notebooks" / "05_your_model.ipynb")
    shown = data_of(cells)
    assert "image/png" in shown["scatter"][0] and "of 3 answers are equal" in printed(cells["devices"])
    assert printed(cells["structured"]).startswith("Function(name=")
    assert shown["end"] == [{"text/plain": "0"}]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_rollouts_runs() -> None:
    cells = run(ROOT / "notebooks" / "06_rollouts.ipynb", optimized=True, timeout=900)
    first, last = printed(cells["learn"]).split("\n")[0].removeprefix("reward ").split(" -> ")
    assert float(last) > 2 * float(first)
    assert "image/png" in data_of(cells)["curve"][0] and "weights {20}" in printed(cells["after"])
    assert data_of(cells)["end"] == [{"text/plain": "0"}]


@pytest.mark.full
def test_images_runs(tmp_path: Path) -> None:
    """With a tiny model, whose answers mean nothing."""
    text = {**VARIANTS["smolvlm"]["text_config"], "max_position_embeddings": 512}
    write_image_model(tmp_path, "smolvlm", text_config=text)
    path = ROOT / "notebooks" / "07_images.ipynb"
    cells = run(path, MODEL=str(tmp_path))
    shown = data_of(cells)
    assert "image/png" in shown["draw"][0] and "image/png" in shown["plot"][0]
    assert printed(cells["trace"]).startswith("1 of ")
    whole, small, refused = printed(cells["size"]).splitlines()
    assert int(whole.split()[1]) > int(small.split(": ")[2].split()[0])
    assert "only size.longest_edge and do_image_splitting" in refused
    assert len(printed(cells["any"]).splitlines()) == 8
    assert shown["end"] == [{"text/plain": "0"}]


@pytest.mark.full
def test_your_architecture_runs() -> None:
    cells = run(ROOT / "notebooks" / "08_your_architecture.ipynb")
    again, compiled = printed(cells["prefix"]).splitlines()
    assert int(again.split(" - ")[1].split()[0]) > 100 and compiled.startswith("0 programs")
    lines = [*printed(cells["engine"]).splitlines(), again, *printed(cells["variants"]).splitlines()]
    largest = {line.split(":")[0]: float(line.split(": at most ")[1].split(",")[0]) for line in lines}
    assert len(largest) == 5 and 0.001 < largest.pop("int8 weights") < 0.5
    assert max(largest.values()) < 1e-4
