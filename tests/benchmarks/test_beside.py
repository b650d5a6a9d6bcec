"""The comparison with vLLM: with a stub for both engines, which answers at once, hangs or ends."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import beside, rows
from benchmarks.gpu.beside import Case, Load
from tests.extras import of_extra

STUB = """#!{python}
import json, os, pathlib, signal, sys
task = json.load(sys.stdin)
result = {{"first_token": {first}, "versions": {{"vllm": "9"}}, "measured": {{}}, "failed": {{}}}}
def note():
    new = pathlib.Path(task["result"] + ".new")
    new.write_text(json.dumps(result))
    new.replace(task["result"])
note()
pathlib.Path({pid!r}).write_text(str(os.getpid()))
for name, work in task["measures"].items():
    assert [len(prompt) for prompt in work["prompts"]] == [4, 4], work
    if name == "hangs":
        signal.pause()
    if name == "ends":
        sys.exit("no memory")
    if name == "raises":
        result["failed"][name] = "ValueError: no"
    else:
        result["measured"][name] = [{rate}]
    note()
"""


def stub(folder: Path, name: str, rate: float) -> str:
    file = folder / name
    file.write_text(
        STUB.format(python=sys.executable, first=1e12, pid=str(folder / f"{name}.pid"), rate=rate)
    )
    file.chmod(0o700)
    return str(file)


def case(name: str, limit: float = 60.0, *, of_prompts: bool = False) -> Case:
    return Case(name, [4, 4], [2, 2], limit, of_prompts=of_prompts)


def test_each_case_has_its_row_and_its_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load([case("a")], [case("raises"), case("b", of_prompts=True)], 4, 64)
    monkeypatch.setattr(beside, "SMALL", load)
    monkeypatch.setenv("VLLM_PYTHON", stub(tmp_path, "theirs", 10))
    monkeypatch.delenv("MODELS", raising=False)
    monkeypatch.setattr(sys, "executable", stub(tmp_path, "ours", 15))
    found = {row.case: row for row in beside.measure(small=True)}
    assert [name for name in found if "vllm" in name] == [
        f"demo, vllm, {name}"
        for name in (
            "first start: first token", "first start: a",
            "second start: first token", "second start: raises", "second start: b",
        )
    ]  # fmt: skip
    assert found["demo, vllm, first start: a"].values == {"tokens/s": 10}
    assert found["demo, jengine, first start: a"].values == {"tokens/s": 15, "times vLLM's": 1.5}
    assert found["demo, jengine, second start: b"].values["tokens/s"] == 30  # two tokens of prompts for each
    assert found["demo, jengine, second start: raises"].outcome == rows.FAILED


@pytest.mark.parametrize(
    ("name", "why"), [("hangs", "more than 0 s"), ("ends", "the process ended with 1: no memory")]
)
def test_a_process_that_hangs_or_ends(name: str, why: str, tmp_path: Path) -> None:
    """Earlier results stay, later cases are not waited for, and no process is left."""
    cases = [case("a"), case(name, 60.0 if name == "ends" else 0.1), case("b")]
    python, folder = stub(tmp_path, "engine", 10), rows.ROOT / "jengine" / "demo"
    found = list(beside.run("vllm", python, folder, Load((), cases, 4, 64), cases, tmp_path, settle=True))
    assert [(row.case, row.outcome, row.why) for row in found[1:]] == [("a", "ok", ""), (name, "failed", why)]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "engine.pid").read_text()), 0)


def test_the_load_is_nano_vllms() -> None:
    load = beside.full()
    [nano] = [case for case in load.second if case.name.startswith("nano")]
    assert len(nano.prompts) == len(nano.outputs) == 256 <= load.sequences
    assert (min(nano.prompts), max(nano.outputs)) >= (100, 1000) and max(nano.prompts) <= 1024
    assert all(max(each.prompts) + max(each.outputs) <= load.tokens for each in load.second)


def test_the_plot_has_models_that_both_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    plots = of_extra("bench", "matplotlib") and importlib.import_module("benchmarks.plots")
    found = {
        f"{model}, {engine}, second start: {name}": 10.0
        for model, engine in (("small", "vllm"), ("small", "jengine"), ("large", "jengine"))
        for name in plots.BESIDE_PANELS
    }
    entries = [{"case": "vLLM"}, *({"case": name, "tokens/s": rate} for name, rate in found.items())]
    monkeypatch.setattr(plots, "_read", lambda name: {"beside": {"rows": entries}})
    bars = {"jengine, small": 10.0, "vLLM, small": 10.0}
    assert plots.beside_vllm() == dict.fromkeys(plots.BESIDE_PANELS.values(), bars)
    monkeypatch.setattr(plots, "_read", lambda name: {})
    assert plots.beside_vllm() == {title: {} for title in plots.BESIDE_PANELS.values()}
