"""Where commands write their results is checked before they work for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jengine import cli
from jengine.commands import terminal


@pytest.mark.parametrize(
    "command",
    [
        ["tune", "demo", "trace.jsonl", "--out"],
        ["trace", "127.0.0.1:1", "--output"],
        ["profile", "127.0.0.1:1", "--output"],
        ["bench", "throughput", "--output-json"],
        ["bench", "latency", "--output-json"],
        ["bench", "gpu", "--out"],
        ["bench", "serve", "--port=1", "--plot"],
    ],
)
def test_where_results_go_is_checked_before_the_work(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # messages shorten long paths
    for path in ("nowhere/out", "."):
        assert cli.main([*command, path]) == 2
        error = capsys.readouterr().err
        assert f"={path!r}: cannot be written: " in error and error.count("\n") == 1, error


def test_checking_an_output_leaves_it_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("earlier results")
    for name in ("old", "new"):
        terminal.check_output("out", tmp_path / name)
    assert [*tmp_path.iterdir()] == [tmp_path / "old"] and (tmp_path / "old").read_text() == "earlier results"
