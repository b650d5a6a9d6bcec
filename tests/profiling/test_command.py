"""`jengine profile -- COMMAND`: Python processes that use jengine profile themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jengine import InvalidArgument, ProfileOptions, cli
from jengine.insight.profiling.command import profile_command
from jengine.insight.profiling.findings import findings

QUICK = ProfileOptions(jax=False, heap=False, system_calls="off")
USES = """
import sys, threading, time, types
name = "jengine.engine.loop.engine"
sys.modules[name] = types.ModuleType(name)  # as if it had been imported
lock = threading.Lock()
def hold():
    with lock:
        time.sleep(0.5)
holder = threading.Thread(target=hold, name="holder")
holder.start()
with lock:
    pass
holder.join()
sys.exit(3)
"""


def test_a_program(tmp_path: Path) -> None:
    """The program runs as it does without a profile, including its own sitecustomize, and its exit code is
    returned.
    """
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.CUSTOMIZED = True")
    (tmp_path / "program.py").write_text("assert CUSTOMIZED\n" + USES)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), str(Path(cli.__file__).parent.parent)]))
        profile, capture, code = profile_command([sys.executable, str(tmp_path / "program.py")], QUICK)
    [process] = profile.processes
    assert (
        code == 3
        and capture == b""
        and process.command.endswith("program.py")
        and process.name == "program.py"
    )
    assert {*process.missing} >= {"heap growth", "jax.profiler", "system calls"}
    assert process.steps is None
    [wait] = [wait for wait in process.lock_waits if wait.thread == "MainThread"]
    assert wait.lock == "lock" and wait.holder.startswith("holder, in hold (")
    assert [finding.name for _, finding in findings(profile)] == ["lock"]


@pytest.mark.parametrize(
    "command, words",
    [
        ([sys.executable, "-c", "pass"], "used jengine's engine or server"),
        (["/nowhere/at-all"], "cannot be run: No such file"),
    ],
)
def test_what_cannot_be_profiled(command: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidArgument, match=r"^command="):
        profile_command(command, QUICK)
    assert cli.main(["profile", "--no-jax", "--system-calls", "off", "--", *command]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--seconds", "3"], ["--tls"], ["--api-key-file", "key"]])
def test_flags_of_servers_are_refused(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", *flag, "--", sys.executable]) == 2
    assert "is only for a server" in capsys.readouterr().err


@pytest.mark.full
def test_a_command_of_jengine(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    command = [
        "jengine",
        "generate",
        "demo",
        "def f(",
        "--max-tokens",
        "100",
        "--ignore-eos",
        "--max-num-seqs",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "jengine.cli", "profile", "--output", str(report), "--heap", "--", *command],
        check=True,
        capture_output=True,
        text=True,
    )
    text = report.read_text()
    assert (
        "tokens/s" in done.stderr
        and "Slow steps" in text
        and "Operations of JAX" in text
        and report.with_suffix(".jax.zip").is_file()
    )
    assert "engine, process" in text and "Growth of Python's heap" in text
