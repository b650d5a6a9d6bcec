"""Fenced code blocks of Markdown pages."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "pallas_kernels" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<reason> *<!-- not run: [^\n]+ -->\n)?(?P<indent>"
    r" *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """
    Attributes:
        where: page:line.
        runs: False below a comment `<!-- not run: REASON -->`.
    """

    where: str
    language: str
    code: str
    runs: bool


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path, *languages: str) -> list[Block]:
    """The blocks in these languages, or all."""
    text = page.read_text()
    found = [
        Block(
            f"{name_of(page)}:{text.count(chr(10), 0, match.start()) + 1}",
            match["language"],
            textwrap.dedent(match["code"]),
            match["reason"] is None,
        )
        for match in FENCE.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]
