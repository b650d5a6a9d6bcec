"""How decode attention is cut up: the rules, the table over them, and the search that fills it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pallas_kernels import tune, tuning
from pallas_kernels.tuning import DecodeCase, DecodeChoice

CASE = DecodeCase("int8", "bfloat16", heads=32, kv_heads=8, head_dim=128, page_size=64, rows=4, tokens=1 << 20)
GPU: Any = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0", core_count=100)


def test_splits_fill_the_chip_and_are_not_too_short() -> None:
    def splits(**what: int) -> int:
        return tuning.default_decode(replace(CASE, **what), cores=100).splits

    assert splits(rows=1) == 25
    assert splits(rows=256) == 1
    assert splits(rows=1, kv_heads=1, tokens=4 * tuning.SPLIT_TOKENS) == 4
    assert splits(rows=1, kv_heads=1, tokens=16) == 1


def test_the_table_goes_before_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuning.decode(CASE, GPU) == tuning.default_decode(CASE, cores=100)
    table = tuning.updated({}, "NVIDIA H200", {CASE: DecodeChoice(3, 5), replace(CASE, rows=8): DecodeChoice(2)})
    monkeypatch.setattr(tuning, "table", lambda: json.loads(json.dumps(table)))
    assert tuning.decode(CASE, GPU) == DecodeChoice(3, 5)
    assert tuning.decode(replace(CASE, rows=3, tokens=(1 << 20) - 7), GPU) == DecodeChoice(3, 5)  # the same classes
    assert tuning.decode(replace(CASE, rows=5), GPU) == DecodeChoice(2)
    for other in (replace(CASE, rows=9), replace(CASE, cache="uint8"), replace(CASE, page_size=32)):
        assert tuning.decode(other, GPU) == tuning.default_decode(other, cores=100)
    elsewhere: Any = SimpleNamespace(device_kind="NVIDIA H100")
    assert tuning.decode(CASE, elsewhere) == tuning.default_decode(CASE, tuning.CORES)


def test_the_file_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, which may be empty, and with an entry."""
    before = json.loads(tuning.FILE.read_text())
    assert tuning.table() == before
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps(tuning.updated(before, "NVIDIA H200", {CASE: DecodeChoice(3, 5)})))
    monkeypatch.setattr(tuning, "FILE", file)
    monkeypatch.setattr(tuning, "table", tuning.table.__wrapped__)  # not the one that is kept
    assert tuning.decode(CASE, GPU) == DecodeChoice(3, 5)


def test_the_search_takes_what_is_worth_it_and_leaves_out_what_does_not_fit() -> None:
    near, far = replace(CASE, rows=1), replace(CASE, rows=2)

    def timer(case: DecodeCase, choice: DecodeChoice) -> float:
        if choice.stages == 6:
            return math.inf
        gain = 0.5 if case == far else 0.99
        return gain if choice == DecodeChoice(6, 3) else 1.0

    first, second = tune.search([near, far], 100, timer)
    assert (first.choice, first.default, first.best) == (tuning.default_decode(near, 100), 1.0, 1.0)
    assert (second.choice, second.default, second.best) == (DecodeChoice(6, 3), 1.0, 0.5)
    assert "| 1000000.0 | 500000.0 | 2.00 | 6 | 3 |" in tune.row(second)


def test_what_is_found_is_written_beside_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"NVIDIA H100": {"a": {"splits": 1}}}))
    monkeypatch.setattr(tune.jax, "devices", lambda: [GPU])
    monkeypatch.setattr(tune, "CASES", [CASE])
    monkeypatch.setattr(tune, "seconds", lambda case, choice: 1.0 if choice.stages is None else 0.5)
    tune.main(["--out", str(file)])
    table = json.loads(file.read_text())
    assert table["NVIDIA H100"] == {"a": {"splits": 1}}
    assert table["NVIDIA H200"][CASE.key()]["stages"] == 2
    assert CASE.key() in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tune.main([])
    assert stopped.value.code == 1
    assert "device=cpu: tuning needs a Hopper GPU" in capsys.readouterr().err


def test_arrays_are_what_a_case_says() -> None:
    q, k, v, tables, lengths = tune.arrays(DecodeCase("uint8", "bfloat16", 4, 2, 64, 16, rows=2, tokens=32))
    assert q.shape == (2, 4, 64) and k.shape == v.shape == (5, 2, 16, 64) and k.values.dtype == "uint8"
    assert sorted(tables.reshape(-1).tolist()) == [1, 2, 3, 4] and lengths.tolist() == [32, 32]
