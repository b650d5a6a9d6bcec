"""Paths and names on pages about the design are there, and the front page's cards are whole."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGES = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]
FILE = re.compile(r"`([\w./-]+\.(?:py|ll|proto|toml|json|yaml|js|html))(?::[^`]*)?`")
FOLDERS = "jengine", "pallas_kernels", "serving", "tests", "tools", "benchmarks"
FEW_FILES, FEW_LINES = 12, 3_000  # what one reads to follow a request
FREE = re.compile(r"NAME|^adapter_config|config\.json$|_config\.json$|\.safetensors|index\.json$")  # not ours


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Names of all files."""
    return {file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path, names: set[str]) -> None:
    found = [path for path in FILE.findall(page.read_text()) if not FREE.search(path)]
    missing = [
        path
        for path in found
        if not (
            (ROOT / path).exists() or (ROOT / "jengine" / path).exists() if "/" in path else path in names
        )
    ]
    assert missing == []


def test_a_newcomer_reads_few_files() -> None:
    """Those that ARCHITECTURE names for a request's way. A bare name is a file of the folder before it."""
    [listed] = re.findall(
        r"lines, tell all of this: ([^.]*(?:\.py[^.]*)*)\.", (ROOT / "ARCHITECTURE.md").read_text()
    )
    folder, files = ROOT, []
    for name in re.findall(r"`([\w/]+\.py)`", listed):
        folder = (ROOT / "jengine" / name).parent if "/" in name else folder
        files.append(folder / Path(name).name)
    assert 5 < len({*files}) == len(files) <= FEW_FILES
    assert sum(len(file.read_text().splitlines()) for file in files) <= FEW_LINES


def test_names_can_be_imported() -> None:
    names = re.findall(r"`((?:jengine|pallas_kernels)(?:\.\w+)+)`", (ROOT / "ARCHITECTURE.md").read_text())
    assert len(names) > 20
    for name in names:
        assert pkgutil.resolve_name(name) is not None


def test_cards_have_a_title_and_a_text() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    [cards] = re.findall(r'<div class="grid cards" markdown>\n(.*?)</div>', text, re.DOTALL)
    whole = re.findall(r"^- \*\*\[[^\]]+\]\([^)]+\)\*\*\n\n    \S.*$", cards, re.MULTILINE)
    assert len(whole) == cards.count("- **[") > 4
