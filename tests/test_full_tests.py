"""Parts of the long tests, the record of their runs, and the number of processes."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import full_tests
import jobs
import pytest
from full_tests import (
    LEDGER,
    PARTS,
    ROOT,
    age,
    arguments,
    chosen,
    outcomes,
    part_of,
    read,
    recorded,
    within,
    write,
)

OLDEST = 60  # commits
FULL = "mark.full"
FILES = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")]


def test_a_part_is_named_or_counted() -> None:
    names = [name for name, part in PARTS.items() if not part.integration]
    assert chosen("") == names
    assert [chosen(f"{place}/{len(names)}") for place in range(1, len(names) + 1)] == [
        [name] for name in names
    ]
    assert chosen("models") == ["models"] and chosen("ray") == ["ray"]
    for wrong in ("model", "0/8", f"{len(names) + 1}/{len(names)}", "1/3", "1/", "-1/8"):
        with pytest.raises(ValueError, match=rf"PART={wrong}: there are 1/{len(names)} {names[0]}, "):
            chosen(wrong)


def test_each_long_test_is_in_one_part() -> None:
    """Of the paths that pytest is given, with those that it ignores."""
    runs: Counter[str] = Counter()
    for name in PARTS:
        paths = [word for word in arguments(name) if not word.startswith("--")]
        ignored = [word.removeprefix("--ignore=") for word in arguments(name) if word.startswith("--")]
        assert all((ROOT / path).exists() for path in [*paths, *ignored])
        collected = [
            f
            for f in FILES
            if any(within(f, path) for path in paths) and not any(within(f, path) for path in ignored)
        ]
        assert {part_of(file) for file in collected} == {name}
        assert PARTS[name].integration or any(FULL in (ROOT / file).read_text() for file in collected)
        runs.update(collected)
    assert runs == Counter(FILES)


def test_parts_cover_code_that_exists() -> None:
    for part in PARTS.values():
        assert part.covers and all((ROOT / path).exists() for path in part.covers)


REPORT = """<testsuites><testsuite>
<testcase file="tests/a.py" time="1.4"/>
<testcase file="tests/a.py" time="1.4"/>
<testcase file="tests/b.py" time="2.0"><failure/></testcase>
<testcase file="tests/b.py" time="2.0"><error/></testcase>
<testcase file="tests/b.py" time="0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_results_are_counted() -> None:
    found = outcomes(ElementTree.fromstring(REPORT))
    assert found.counts == {"passed": 2, "failed": 2, "skipped": 1}
    assert found.files == {"tests/a.py": 3, "tests/b.py": 4}


def test_a_run_with_failures_is_recorded_and_does_not_renew_the_age(tmp_path: Path) -> None:
    ledger = tmp_path / "full.toml"
    first = {
        "commit": "b",
        "date": datetime(2026, 11, 23, 12, 0, tzinfo=UTC),
        "passed": 3,
        "failed": 1,
        "files": {"tests/a.py": 4},
    }
    write(ledger, {"models": recorded({"since": "a", "never_run": True}, first)})
    assert read(ledger) == {"models": {"since": "a", **first}}
    second = {**first, "commit": "c", "failed": 0}
    write(ledger, {**read(ledger), "models": recorded(read(ledger)["models"], second)})
    assert read(ledger)["models"]["since"] == read(ledger)["models"]["commit"] == "c"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def commit(folder: Path, file: str) -> str:
    """Adds a line to the file."""
    with (folder / file).open("a") as changed:
        changed.write("# more\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", file)
    return git(folder, "rev-parse", "HEAD")


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@needs_git
def test_the_age_is_the_number_of_commits_of_the_code(tmp_path: Path) -> None:
    assert age({"since": "HEAD"}, ["a"], tmp_path) is None  # no repository
    git(tmp_path, "init", "--quiet")
    since = [commit(tmp_path, file) for file in ("a", "b", "a", "a")]
    assert [age({"since": name}, ["a"], tmp_path) for name in since] == [2, 2, 1, 0]
    assert age({"since": since[0]}, ["a", "b"], tmp_path) == 3
    assert age({"since": "0" * 40}, ["a"], tmp_path) is None  # of another history
    git(tmp_path, "clone", "--quiet", "--depth", "2", tmp_path.as_uri(), "shallow")
    assert age({"since": since[2]}, ["a"], tmp_path / "shallow") is None


TESTS = """
import pytest
from hypothesis import given, strategies
@pytest.mark.full
def test_passes(): pass
@pytest.mark.full
def test_fails(): assert False
@pytest.mark.full
def test_is_skipped(): pytest.skip("not here")
@given(strategies.integers())
def test_is_of_a_property(number): pass
def test_is_of_make_test(): pass
"""


@needs_git
def test_a_run_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If it ends, and nothing is uncommitted."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_long.py").write_text(TESTS)
    (tmp_path / "tests" / "conftest.py").write_text(
        "from hypothesis import settings\nsettings.register_profile('full')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\ntestpaths = tests\n")
    git(tmp_path, "init", "--quiet")
    head = commit(tmp_path, "code.py")
    ledger = tmp_path / "tests" / "full.toml"
    monkeypatch.setattr(full_tests, "ROOT", tmp_path)
    monkeypatch.setattr(full_tests, "LEDGER", ledger)
    monkeypatch.setattr(full_tests, "git", lambda *words: git(tmp_path, *words))
    monkeypatch.setattr(full_tests, "arguments", lambda name: ["tests/test_long.py"])
    options = ["-q", "-p", "no:cacheprovider"]
    assert full_tests.run("models", options) == 1
    entry = read(ledger)["models"]
    assert (entry["passed"], entry["failed"], entry["skipped"]) == (2, 1, 1)
    assert entry["commit"] == entry["since"] == head and entry["files"].keys() == {"tests/test_long.py"}
    ledger.unlink()
    (tmp_path / "code.py").write_text("")
    assert full_tests.run("models", options) == 1 and not ledger.exists()
    assert "Part models is not recorded: there are uncommitted changes" in capfd.readouterr().out
    git(tmp_path, "checkout", "--quiet", "code.py")
    assert full_tests.run("models", [*options, "--no-such-option"]) == 4 and not ledger.exists()
    assert "did not come to its end (status 4): not recorded" in capfd.readouterr().out


@pytest.mark.parametrize("name", PARTS)
def test_each_part_ran_not_long_ago(name: str) -> None:
    """make test-full PART=... renews a record."""
    entry = read(LEDGER)[name]
    commits = age(entry, PARTS[name].covers)
    if commits is None:
        pytest.skip(f"git does not know how old {entry['since']} is: a shallow clone, or another history")
    assert commits <= OLDEST, f"{commits} commits since `make test-full PART={name}` passed"


@pytest.mark.parametrize(
    "cores, gib, expected", [(2, 24, 2), (16, 128, 16), (16, 24, 4), (1.5, 24, 1), (2, 3, 1)]
)
def test_processes_follow_cores_and_memory(cores: float, gib: float, expected: int) -> None:
    assert jobs.jobs(cores, gib * jobs.GIB) == expected


def test_a_containers_limits_count(tmp_path: Path) -> None:
    cores = jobs.cores(tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert jobs.cores(tmp_path) == cores >= 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert jobs.cores(tmp_path) == 0.5
