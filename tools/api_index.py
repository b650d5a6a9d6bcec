"""Lists the public names of `jengine` by the pages of the API reference that document them."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path

import jengine

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "reference" / "api"
ENTRY = re.compile(r"^::: jengine\.([\w.]+)$", re.MULTILINE)


def entries(page: Path) -> list[str]:
    """What a page documents, such as `LLM` and `LLM.costs`, without `jengine.`."""
    return ENTRY.findall(page.read_text())


def pages() -> list[Path]:
    """In the order of the site's navigation."""
    order = re.findall(r"reference/api/([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text())
    return [PAGES / name for name in order if name != "index.md"]


def public_names() -> str:
    """A table for each page. Its rows have the anchors that the names had when the reference was one page."""
    return "\n\n".join("\n".join(_table(page)) for page in pages())


def _table(page: Path) -> Iterator[str]:
    title = page.read_text().partition("\n")[0].removeprefix("# ")
    yield f"## [{title}]({page.name})\n"
    yield "| Name | Meaning |"
    yield "| --- | --- |"
    for name in entries(page):
        anchor = f'<a id="jengine.{name}"></a>' if name in jengine.__all__ else ""
        shown = name if name.partition(".")[0] in jengine.__all__ else name.rpartition(".")[2]
        meaning = _first_sentence(pydoc.locate(f"jengine.{name}"))
        yield f"| {anchor}[`{shown}`]({page.name}#jengine.{name}) | {meaning} |"


def _first_sentence(thing: object) -> str:
    text = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z])", text)[0].replace("|", r"\|")
