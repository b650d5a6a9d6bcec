"""Run the golden tests and write their results into docs/guides/models.md, between its markers.

    python tools/support_matrix.py [MODEL_TYPE ...]

With names, only the tests of these families run, and only their rows change. A cell has the number of a
family's tiny models that agree with transformers on this machine's devices, or "untested".
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from xml.etree import ElementTree

import jax

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from jengine.models import FAMILIES  # noqa: E402
from tests.golden.variants import VARIANTS  # noqa: E402

BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"
TESTS = {
    "test_logits_match_transformers": "logits",
    "test_greedy_tokens_and_logprobs": "engine",
    "test_sharded_over_two_devices": "two devices",
}
PLATFORMS = {"cpu": "CPU", "gpu": "NVIDIA GPU"}
# (family, kind of test) -> numbers of passed (True) and failed tests
Outcomes = dict[tuple[str, str], Counter[bool]]


def run(families: Collection[str] = FAMILIES) -> Outcomes:
    others = [variant for variant, config in VARIANTS.items() if config["model_type"] not in families]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        files = ["tests/models/test_golden.py", "tests/engine/test_golden.py"]
        command = [sys.executable, "-m", "pytest", *files, "-m", "full or not full", f"--junitxml={report}"]
        command += [
            f"--deselect={file}::{test}[{variant}]" for file in files for test in TESTS for variant in others
        ]
        subprocess.run(command, cwd=ROOT, check=False)
        return outcomes(ElementTree.parse(report).getroot())


def outcomes(report: ElementTree.Element) -> Outcomes:
    """The outcomes in pytest's JUnit report."""
    found: Outcomes = {}
    for case in report.iter("testcase"):
        test, _, variant = case.attrib["name"].rstrip("]").partition("[")
        if test not in TESTS or case.find("skipped") is not None:
            continue
        passed = case.find("failure") is None and case.find("error") is None
        found.setdefault((str(VARIANTS[variant]["model_type"]), TESTS[test]), Counter())[passed] += 1
    return found


def table(found: Outcomes, platform: str, before: Mapping[str, str] | None = None) -> str:
    """before: rows of families of which nothing was found now."""

    def cell(family: str, kind: str) -> str:
        counts = found.get((family, kind))
        if not counts:
            return "untested"
        return (
            f"passed ({counts[True]})"
            if not counts[False]
            else f"**failed** ({counts[False]} of {counts.total()})"
        )

    head = ["Family", "`model_type`", *(f"{PLATFORMS[platform]}: {kind}" for kind in TESTS.values())]
    rows = {
        name: [family.title, f"`{name}`", *(cell(name, kind) for kind in TESTS.values())]
        for name, family in FAMILIES.items()
    }
    lines = {name: _line(row) for name, row in rows.items()} | dict(before or {})
    return "\n".join([_line(head), _line(["---"] * len(head)), *(lines[name] for name in FAMILIES)])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def rows_of(page: Path, begin: str = BEGIN, end: str = END) -> dict[str, str]:
    """The table's lines as they are, by model_type."""
    lines = page.read_text().split(begin)[1].split(end)[0].splitlines()
    named = {line.split("|")[2].strip(" `"): line for line in lines if line.startswith("| ")}
    return {name: line for name, line in named.items() if name in FAMILIES}


def write(page: Path, content: str, begin: str = BEGIN, end: str = END) -> None:
    text = page.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{before}{begin}\n{content}\n{end}{after}")


if __name__ == "__main__":
    chosen, page = sys.argv[1:] or list(FAMILIES), ROOT / "docs" / "guides" / "models.md"
    if unknown := {*chosen} - {*FAMILIES}:
        sys.exit(f"unknown model_type: {', '.join(sorted(unknown))}")
    found = run(chosen)
    write(
        page,
        table(
            found,
            jax.default_backend(),
            {name: row for name, row in rows_of(page).items() if name not in chosen},
        ),
    )
    sys.exit(any(counts[False] for counts in found.values()))
