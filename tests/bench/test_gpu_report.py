"""`jengine bench gpu`: the suite's parts, and a report without names. tests/benchmarks runs the suite."""

from __future__ import annotations

import getpass
import json
import os
import socket
from pathlib import Path

import pytest

from benchmarks import gpu_suite
from jengine import cli
from jengine.capacity.bench import gpu

SUITE = """import json, pathlib, sys
*parts, minutes, out = sys.argv[1:]
file = pathlib.Path(out.removeprefix("--out="))
kept = json.loads(file.read_text())
why = "OSError: " + str(pathlib.Path.home() / "models" / "a.bin") + " at NODE"
file.write_text(json.dumps({**kept, "parts": parts, "minutes": minutes, "rows": [{"why": why, "us": 2.5}]}))
sys.exit(1)
"""


def test_the_report_has_results_and_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "suite" / "benchmarks"
    folder.mkdir(parents=True)
    (folder / "gpu_suite.py").write_text(SUITE.replace("NODE", socket.gethostname()))
    monkeypatch.setattr(gpu, "suite_folder", lambda: folder.parent)
    out = tmp_path / "report.json"
    assert cli.main(["bench", "gpu", "--out", str(out), "--minutes", "3"]) == 1, "as the suite"
    assert json.loads(out.read_text()) == {
        "parts": [*gpu.PARTS],
        "minutes": "--minutes=3.0",
        "rows": [{"why": "OSError: a.bin at NAME", "us": 2.5}],
    }
    assert "attach it to an issue of jengine's repository" in capsys.readouterr().out
    assert cli.main(["bench", "gpu", "--minutes", "0"]) == 2
    assert "minutes=0.0: must be at least 1" in capsys.readouterr().err


def test_folders_users_and_hosts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(socket, "gethostname", lambda: "box-7")
    text = "at /home/ann/x/y.py:3, ~/z.bin, by ann on box-7: annotated, 3/4 of 2 GB/s, a/b"
    assert gpu.without_names({"why": [text, None, 1.5]}) == {
        "why": ["at y.py:3, z.bin, by NAME on NAME: annotated, 3/4 of 2 GB/s, a/b", None, 1.5]
    }


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1 << 30)
    monkeypatch.setattr(socket, "gethostname", lambda: "box-7")
    assert gpu.without_names("/root/a.bin on box-7") == "a.bin on NAME"


def test_a_checkout_has_the_parts() -> None:
    assert (gpu.suite_folder() / "benchmarks" / "gpu_suite.py").samefile(gpu_suite.__file__)
    assert {*gpu.PARTS} <= {*gpu_suite.PARTS}
