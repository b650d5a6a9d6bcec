"""The support matrix shows the results of a report, and "untested" without one."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from support_matrix import BEGIN, END, outcomes, rows_of, table, write

from jengine.models import FAMILIES

REPORT = """<testsuites><testsuite>
<testcase name="test_logits_match_transformers[gpt2]"/>
<testcase name="test_logits_match_transformers[opt_125m]"/>
<testcase name="test_logits_match_transformers[opt_350m]"><failure/></testcase>
<testcase name="test_greedy_tokens_and_logprobs[opt_125m]"><error/></testcase>
<testcase name="test_greedy_tokens_and_logprobs[gpt2]"><skipped/></testcase>
<testcase name="test_goldens_are_what_they_claim"/>
</testsuite></testsuites>"""


def rows() -> dict[str, list[str]]:
    lines = table(outcomes(ElementTree.fromstring(REPORT)), "cpu").splitlines()[2:]
    return {
        cells[1].strip("`"): cells[2:]
        for cells in ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    }


def test_cells() -> None:
    assert set(rows()) == set(FAMILIES)
    assert rows()["gpt2"] == ["passed (1)"] + ["untested"] * 2
    assert rows()["opt"] == ["**failed** (1 of 2)", "**failed** (1 of 1)", "untested"]
    assert "| NVIDIA GPU: logits |" in table({}, "gpu")


def test_rows_of_other_families_stay(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"{BEGIN}\n{table({}, 'cpu').replace('`opt` | untested', '`opt` | passed (3)')}\n{END}")
    old = {name: row for name, row in rows_of(page).items() if name != "gpt2"}
    assert set(rows_of(page)) == set(FAMILIES)
    new = table(outcomes(ElementTree.fromstring(REPORT)), "cpu", old)
    assert "| `gpt2` | passed (1) |" in new and "| `opt` | passed (3) |" in new


def test_only_the_table_is_written(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(readme, "new")
    assert readme.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
