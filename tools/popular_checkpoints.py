"""Print which popular checkpoints load, and why the others do not; write their share of downloads into
docs/guides/models.md.

    python tools/popular_checkpoints.py

Reads tests/data/popular_checkpoints.json. Its survey counts downloads by group, so the share is a range. The
low end counts groups that load completely; the high end also counts groups that load in part.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support_matrix import write

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from jengine.checkpoints.quantized_formats import METHODS  # noqa: E402
from jengine.models import FAMILIES  # noqa: E402

PAGE = ROOT / "docs" / "guides" / "models.md"
SURVEY = ROOT / "tests" / "data" / "popular_checkpoints.json"
BEGIN, END = "<!-- popular checkpoints: begin -->", "<!-- popular checkpoints: end -->"


@dataclass(frozen=True)
class Group:
    """A group of the survey: its downloads, and for each model_type why it does not load, or None if it
    does.
    """

    name: str
    downloads: float
    reasons: dict[str, str | None]


def judged(survey: dict[str, Any]) -> list[Group]:
    return [
        Group(group["name"], group["downloads"], {t: _reason(t, group) for t in group["model_types"]})
        for group in survey["groups"]
    ]


def _reason(model_type: str, group: dict[str, Any]) -> str | None:
    if model_type not in FAMILIES:
        return "the family is not supported"
    if group["format"] not in ("safetensors", "bin"):
        return f"{group['format']} files are not read"
    unread = sorted({*group.get("quantized", ())}.difference(METHODS))
    return f"{', '.join(unread)} is not read" if unread else None


def share(groups: list[Group]) -> tuple[int, int]:
    """The percentages of downloads in groups that load completely, and in groups that load at least in
    part.
    """
    total = sum(group.downloads for group in groups)
    whole = sum(group.downloads for group in groups if not any(group.reasons.values()))
    part = sum(group.downloads for group in groups if not all(group.reasons.values()))
    return round(100 * whole / total), round(100 * part / total)


def sentence(survey: dict[str, Any]) -> str:
    """The sentence in docs/guides/models.md."""
    groups = judged(survey)
    low, _ = share(groups)
    if not any(reason for group in groups for reason in group.reasons.values()):
        return (
            f"jengine supports the model types and formats of all groups of {survey['checkpoints']} popular"
            f" checkpoints\n({survey['source']}, {survey['surveyed']}). The survey kept groups,\nnot names:"
            " the checkpoints were not loaded one by one. `tools/popular_checkpoints.py` lists the groups."
        )
    return (
        f"Among {survey['checkpoints']} popular checkpoints ({survey['source']},"
        f" {survey['surveyed']}),\nthose that jengine loads account for at least {low} % of the downloads."
        " `tools/popular_checkpoints.py` lists them, and the\nreason why each of the others does not load."
    )


if __name__ == "__main__":
    survey = json.loads(SURVEY.read_text())
    for group in judged(survey):
        print(f"{group.name}: {group.downloads:g} {survey['unit']}")
        for model_type, reason in group.reasons.items():
            print(f"    {model_type}: {reason or 'loads'}")
    text = sentence(survey)
    print(f"\n{text}")
    write(PAGE, text, BEGIN, END)
