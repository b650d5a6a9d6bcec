"""Run the golden tests and write their results into docs/guides/models.md, between its markers.

    python tools/support_matrix.py

A cell has the number of a family's tiny models that agree with transformers, or "untested" if this machine runs no such test.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
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
Outcomes = dict[tuple[str, str], Counter[bool]]  # (family, kind of test) -> numbers of passed (True) and failed tests


def run() -> Outcomes:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        files = ["tests/models/test_golden.py", "tests/engine/test_golden.py"]
        command = [sys.executable, "-m", "pytest", *files, "-m", "full or not full", f"--junitxml={report}"]
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


def table(found: Outcomes, platform: str) -> str:
    columns = [(where, kind) for where in PLATFORMS for kind in TESTS.values()]

    def cell(family: str, where: str, kind: str) -> str:
        counts = found.get((family, kind)) if where == platform else None
        if not counts:
            return "untested"
        return f"passed ({counts[True]})" if not counts[False] else f"**failed** ({counts[False]} of {counts.total()})"

    head = ["Family", "`model_type`", *(f"{PLATFORMS[where]}: {kind}" for where, kind in columns)]
    rows = [[family.title, f"`{name}`", *(cell(name, *column) for column in columns)] for name, family in FAMILIES.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def write(page: Path, content: str, begin: str = BEGIN, end: str = END) -> None:
    text = page.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{before}{begin}\n{content}\n{end}{after}")


if __name__ == "__main__":
    found = run()
    write(ROOT / "docs" / "guides" / "models.md", table(found, jax.default_backend()))
    sys.exit(any(counts[False] for counts in found.values()))
