"""What the documentation says of the tests, compared with what is collected."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import docs_figures
import docs_kernels
import jax
import pytest
from ampere_attention import AMPERE_CASES, BLACKWELL_CASES
from ampere_products import AMPERE_FORMATS, AMPERE_PRODUCTS, BLACKWELL_PRODUCTS
from kernel_facts import AMPERE

import pallas_kernels
from jengine.core.config import EngineConfig
from jengine.devices.device_defaults import sizes
from jengine.engine.setup.shapes import make_table
from jengine.execution.kinds import KINDS
from tests.docs.blocks import ROOT
from tests.engine import test_golden as through_the_engine
from tests.golden.variants import VARIANTS
from tests.models import test_golden as in_logits

OTHER_FORMS = {"operand_in_registers", "in_place"}  # parameters of kernels: False for Pallas's interpreter

# programs that only a table with a host tier or with adapters has
OPTIONAL = ("spill", "fill", "allocate-adapters", "write-adapter", "allocate-pool")


def said(page: str, pattern: str) -> list[str]:
    """The groups of the pattern's only match in a page; a space in the pattern may be a line's end."""
    text = (ROOT / page).read_text()
    [found] = re.finditer(pattern.replace(" ", r"\s+"), text)
    return [*found.groups()]


def numbers(page: str, pattern: str) -> list[int]:
    return [int(number) for number in said(page, pattern)]


def cases(test: Any, argument: str) -> tuple[list[Any], list[Any]]:
    """(those that `make test` runs, all) of a parametrized test."""
    marks = getattr(test, "pytestmark", [])
    values = [
        value
        for mark in marks
        if mark.name == "parametrize" and mark.args[0] == argument
        for value in mark.args[1]
    ]
    every = [value if hasattr(value, "marks") else pytest.param(value) for value in values]
    long = [any(mark.name == "full" for mark in [*marks, *one.marks]) for one in every]
    return [one.values[0] for one, full in zip(every, long, strict=True) if not full], [
        one.values[0] for one in every
    ]


def functions_of(module: ModuleType) -> Iterator[Callable[..., Any]]:
    return (test for name, test in vars(module).items() if name.startswith("test_"))


def test_compiled_kernels() -> None:
    module = importlib.import_module("tests.kernels.test_ahead_of_time")
    hopper = [cases(test, argument) for test in functions_of(module) for argument in ("case", "name")]
    in_ci, every = (sum(len(one[which]) for one in hopper) for which in (0, 1))
    page = "docs/guides/kernels.md"
    assert numbers(page, r"has (\d+) forms for Hopper, and (\d+) for Ampere") == [
        every,
        len(AMPERE_CASES | AMPERE_PRODUCTS),
    ]

    few = 0
    for name in "test_ampere", "test_ampere_product":
        ampere = importlib.import_module(f"tests.kernels.{name}")
        assert cases(ampere.test_a_kernel_spills_nothing_and_fits, "target") == (["a100", "b200"], [*AMPERE])
        assert cases(ampere.test_every_kernel_spills_nothing_and_fits, "target") == ([], [*AMPERE])
        few += len(ampere.FEW)
    pattern = r"and (\d+) for Blackwell, of which CI compiles (\d+)\."
    on_blackwell = importlib.import_module("tests.kernels.test_blackwell")
    few_on_blackwell = on_blackwell.FEW + on_blackwell.FEW_PRODUCTS
    assert numbers(page, pattern) == [len(BLACKWELL_CASES | BLACKWELL_PRODUCTS), len(few_on_blackwell)]
    pattern = r"CI compiles (\d+) of the former for an H200 and (\d+) of the latter for an A100 and a\s+B200"
    assert numbers(page, pattern) == [in_ci, few]


def test_evidence_of_kernels_by_card() -> None:
    """What Ampere's kernels serve was executed for each card, or for one that has the same PTX."""
    lines = docs_kernels.cards().splitlines()
    titles, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    by_card = {card: {row[0]: row[place] for row in rows} for place, card in enumerate(titles) if card}
    evidence = {card: {cell for cell in by_card[card].values() if "Ampere" in cell} for card in by_card}
    assert all(cells == {"Ampere, executed"} for cells in evidence.values())
    cells = {cell for of_card in by_card.values() for cell in of_card.values() if "Blackwell" in cell}
    assert cells == ({"Blackwell, executed"} if jax.__version_info__ >= (0, 12) else set())
    assert [target for _, target in docs_kernels.CARDS.values() if target not in (*AMPERE, "h200")] == []
    by_xla = {name for name, cell in by_card["RTX 40, L4, L40S (8.9)"].items() if cell == "XLA"}
    assert {"products, bfloat16", "row quantization"} <= by_xla
    served = "int4", "FP4", "experts", "cache", "latent", "page"
    assert not any(word in name for name in by_xla for word in served)


def test_bounds_of_products() -> None:
    """Eight bits take half the time of sixteen; instructions bound only products of four bits on a B200."""
    titles, _, floor, *rows = ([*line.split("|")[1:-1]] for line in docs_kernels.predictions().splitlines())
    assert len(rows) == len(AMPERE_FORMATS)
    for name, _, *cells in rows:
        for card, cell, of_floats in zip(titles[2:], cells, floor[2:], strict=True):
            by_bytes, by_instructions = map(int, cell.split(","))
            four_bits = "4" in name and "B200" in card
            assert by_instructions < by_bytes + 2 * four_bits and by_bytes < int(of_floats) * 0.55


def test_every_form_of_a_kernel_is_counted() -> None:
    """Each dict of cases in tools/kernel_facts.py is compiled by one test."""
    module, facts = (
        importlib.import_module("tests.kernels.test_ahead_of_time"),
        importlib.import_module("kernel_facts"),
    )
    listed = [
        case
        for name, value in vars(facts).items()
        if isinstance(value, dict) and name.isupper() and name != "ALL"
        for case in value
    ]
    every = [
        case
        for test in functions_of(module)
        for argument in ("case", "name")
        for case in cases(test, argument)[1]
    ]
    assert len(every) == len(listed)


def test_interpreted_kernels() -> None:
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for module in pkgutil.walk_packages(pallas_kernels.__path__, "pallas_kernels."):
        if not re.search(r"\.(llvm|cpu)\b", module.name):
            for name, function in inspect.getmembers(
                importlib.import_module(module.name), inspect.isfunction
            ):
                parameters = inspect.signature(function).parameters.keys()
                if (
                    not name.startswith("_")
                    and function.__module__ == module.name
                    and "interpret" in parameters
                ):
                    found[not OTHER_FORMS.isdisjoint(parameters)].add(name)
    page = "docs/guides/kernels.md"
    through, afterwards = said(
        page,
        "that ships for (.*), whose operands go through shared memory, and for (.*), which adds afterwards",
    )
    [as_they_ship] = said(page, r"which adds afterwards\. (.*) are interpreted as they ship")
    assert {*re.findall(r"`(\w+)`", through + afterwards)} == found[True]
    assert {*re.findall(r"`(\w+)`", as_they_ship)} == found[False]


def test_compared_models() -> None:
    logits, engine = (
        cases(test, "variant")
        for test in (
            in_logits.test_logits_match_transformers,
            through_the_engine.test_greedy_tokens_and_logprobs,
        )
    )
    assert logits[1] == engine[1] == [*VARIANTS]
    page = "docs/guides/models.md"
    assert numbers(page, r"Tests compare (\d+) tiny models") == [len(VARIANTS)]
    pattern = (
        r"CI compares the logits of (\d+) of them, at least one of each `model_type`, and takes (\d+) through"
        r" the engine"
    )
    assert numbers(page, pattern) == [len(logits[0]), len(engine[0])]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_table_of_programs(platform: str) -> None:
    config = EngineConfig.of("demo", {})
    chosen = sizes(config, platform)
    table = make_table(config, chosen, platform)
    counts = [len([*keys]) for keys in (table.trunks(), table.samplers(), table.scores())]
    of_cpus = (
        r"defaults for a CPU .*: (\d+) sequences, (\d+) tokens a step\), the table has (\d+) trunks, (\d+)"
        r" samplers and (\d+) scorers"
    )
    of_gpus = r"with those for a GPU \((\d+) and (\d+)\), (\d+), (\d+) and (\d+)\."
    assert numbers("docs/design/programs.md", {"cpu": of_cpus, "gpu": of_gpus}[platform]) == [
        chosen.max_num_seqs,
        chosen.max_num_batched_tokens,
        *counts,
    ]
    if platform == "cpu":
        [loaded] = numbers("docs/service/index.md", r"0 programs compiled, (\d+) loaded")
        assert loaded == sum(counts) + sum(kind.key is str and kind.name not in OPTIONAL for kind in KINDS)


def test_every_finding_is_described() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "jengine/insight/explanations").glob("*.py"))
    page = (ROOT / "docs/design/insight.md").read_text()
    described = {*re.findall(r"^\| (\w+) \|", page, re.M)} - {"finding"}
    assert described == {*re.findall(r"\bFinding\(\s*\"(\w+)\"", sources)}


def test_the_page_of_the_kernels_has_the_measured_figures() -> None:
    """It is shown by a package index, which generates nothing."""
    page = (ROOT / "pallas_kernels" / "README.md").read_text()
    assert docs_figures.gpu_kernels().strip() in page
