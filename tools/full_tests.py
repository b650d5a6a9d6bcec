"""Run the long tests, in parts, and record each part's run in tests/full.toml.

    python tools/full_tests.py [PART] [options of pytest ...]

PART is a name, or a place such as 3/12; without one, all parts run, one after another. A part has the tests
with the marker `full`, and Hypothesis's tests again, with more examples; `make test` runs the others. A run
is recorded if it came to its end and nothing but the record was uncommitted.

The name of an integration is a part, too: all of its tests, in the environment of `make test-integrations`,
where none may be skipped.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
LEDGER = ROOT / "tests" / "full.toml"
HEAD = """\
# Written by `make test-full`: the last run of each part of the long tests. The age of a part is counted from
# the commit `since`: that of the last run without failures or, before there is one, of this file's beginning.
"""
TESTS = "full or hypothesis"  # Hypothesis marks its tests
FAILED = 1  # pytest's exit status, of a run that came to its end


@dataclass(frozen=True)
class Part:
    tests: tuple[str, ...]  # files and folders, without what another part names more closely
    covers: tuple[str, ...]  # the code that they test
    integration: bool = False  # with another project, whose packages have an environment of their own


KERNELS, MODELS = "pallas_kernels", ("jengine/models", "jengine/checkpoints")
ENGINE = ("jengine/engine", "jengine/scheduling", "jengine/table", "jengine/execution")
PARTS = {  # each should take less than an hour on two cores
    "attention": Part(
        (
            "tests/kernels/test_attention_decode.py",
            "tests/kernels/test_attention_prefill.py",
            "tests/test_paged_attention.py",
        ),
        (KERNELS,),
    ),
    "kernels": Part(("tests/kernels",), (KERNELS,)),
    "compiled": Part(  # for GPUs that are not there
        (
            "tests/kernels/test_ahead_of_time.py",
            "tests/kernels/test_ampere.py",
            "tests/kernels/test_ampere_product.py",
            "tests/execution/test_all_reduces.py",
            "tests/execution/test_gpu_programs.py",
            "tests/execution/test_gpu_samplers.py",
            "tests/planning",
        ),
        (KERNELS, "jengine/execution", "jengine/capacity/planning"),
    ),
    "models": Part(("tests/models", "tests/checkpoints", "tests/test_smollm2.py"), MODELS),
    "families": Part(
        ("tests/engine/test_golden.py", "tests/engine/test_quantization.py"), (*MODELS, "jengine/execution")
    ),
    "cache": Part(
        ("tests/engine/test_sharing.py", "tests/engine/test_poison.py", "tests/engine/test_host_tier.py"),
        ENGINE,
    ),
    "speculation": Part(
        (
            "tests/engine/test_speculation_equality.py",
            "tests/engine/test_speculation.py",
            "tests/engine/test_draft_model.py",
            "tests/engine/test_heads.py",
        ),
        ENGINE,
    ),
    "weights": Part(  # that change
        (
            "tests/engine/test_lora.py",
            "tests/engine/test_lora_equality.py",
            "tests/engine/test_many_updates.py",
        ),
        ENGINE,
    ),
    "engine": Part(("tests/engine", "tests/scheduling", "tests/execution"), ENGINE),
    "devices": Part(("tests/parallel",), ("jengine/parallel", "jengine/execution", "jengine/models")),
    "agents": Part(
        ("tests/agents", "tests/serving/test_clients.py"),
        ("jengine/serving/http", "jengine/serving/parsers", "jengine/text"),
    ),
    "service": Part(("tests",), ("jengine/serving", "serving", "jengine/api", "jengine/commands")),
}
PARTS |= {
    name: Part((f"tests/integrations/{name}",), (f"jengine/integrations/{name}",), integration=True)
    for name in ("dynamo", "ray", "skyrl", "smg", "tunix")
}


def chosen(part: str) -> list[str]:
    """The names of the parts to run.

    Raises:
        ValueError: there is no such part.
    """
    names = [name for name, part in PARTS.items() if not part.integration]
    if not part:
        return names
    place, slash, count = part.partition("/")
    if slash and count == str(len(names)) and place in map(str, range(1, len(names) + 1)):
        return [names[int(place) - 1]]
    if part not in PARTS:
        known = ", ".join(f"{place}/{len(names)} {name}" for place, name in enumerate(names, 1))
        raise ValueError(f"PART={part}: there are {known}")
    return [part]


def part_of(file: str) -> str:
    """The part whose path is the closest to this test file."""
    lengths = {
        name: max((len(path) for path in part.tests if within(file, path)), default=0)
        for name, part in PARTS.items()
    }
    return max(lengths, key=lambda name: lengths[name])


def within(file: str, path: str) -> bool:
    return file == path or file.startswith(path + "/")


def arguments(name: str) -> list[str]:
    """pytest's: the part's paths, less those of other parts within them."""
    mine = PARTS[name].tests
    others = [path for other, part in PARTS.items() if other != name for path in part.tests]
    return [
        *mine,
        *(
            f"--ignore={path}"
            for path in others
            if any(within(path, own) and path not in mine for own in mine)
        ),
    ]


def run(name: str, options: Sequence[str]) -> int:
    """Runs a part and records it. Returns pytest's exit status."""
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{LEDGER.relative_to(ROOT)}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *arguments(name),
            "-m",
            "" if PARTS[name].integration else TESTS,
            "--hypothesis-profile=full",
            *options,
        ]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        print(f"Part {name}", flush=True)
        began, before = time.monotonic(), processor_seconds()
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        measured = {
            "seconds": round(time.monotonic() - began),
            "processor_seconds": round(processor_seconds() - before),
        }
        if status not in (0, FAILED):
            print(f"Part {name} did not come to its end (status {status}): not recorded")
        elif not commit or changed:
            print(
                f"Part {name} is not recorded:"
                f" {'there are uncommitted changes' if commit else 'this is no git repository'}"
            )
        else:
            found = outcomes(ElementTree.parse(report).getroot())
            entry = {
                "commit": commit,
                "date": datetime.now(UTC).replace(microsecond=0),
                **found.counts,
                **measured,
                "files": found.files,
            }
            if PARTS[name].integration and found.counts["skipped"]:
                print("Tests of an integration must not be skipped")
                entry["failed"], status = entry["failed"] + entry["skipped"], FAILED
            write(LEDGER, {**read(LEDGER), name: recorded(read(LEDGER).get(name, {}), entry)})
            print(f"Part {name} is recorded in {LEDGER.relative_to(ROOT)}")
        return status


def processor_seconds() -> float:
    """Seconds of all processes that this one started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Outcomes:
    counts: dict[str, int]  # passed, failed, skipped
    files: dict[str, int]  # seconds of the tests of each file


def outcomes(report: ElementTree.Element) -> Outcomes:
    """The results in pytest's JUnit report. A test whose setup or teardown fails has failed; one that is
    expected to fail passes.
    """
    counts, seconds = Counter({"passed": 0, "failed": 0, "skipped": 0}), Counter[str]()
    for case in report.iter("testcase"):
        bad, skipped = (
            case.find("failure") is not None or case.find("error") is not None,
            case.find("skipped"),
        )
        counts["failed" if bad else "skipped" if skipped is not None else "passed"] += 1
        seconds[case.get("file", "")] += float(case.get("time", 0))  # type: ignore[assignment]
    return Outcomes(dict(counts), {file: round(spent) for file, spent in sorted(seconds.items())})


def recorded(before: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """A part's new entry. Its age counts from the commit `since`, which a run with failures does not
    renew.
    """
    return {"since": before.get("since", entry["commit"]) if entry["failed"] else entry["commit"], **entry}


def read(ledger: Path) -> dict[str, dict[str, Any]]:
    return tomllib.loads(ledger.read_text()) if ledger.exists() else {}


def write(ledger: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    lines = [HEAD]
    for name in (name for name in PARTS if name in entries):
        plain = {key: value for key, value in entries[name].items() if key != "files"}
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in plain.items()), ""]
        if files := entries[name].get("files"):
            lines += [
                f"[{name}.files] # seconds",
                *(f'"{file}" = {seconds}' for file, seconds in files.items()),
                "",
            ]
    ledger.write_text("\n".join(lines))


def _toml(value: Any) -> str:
    return value.isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else json.dumps(value)


def age(entry: Mapping[str, Any], covers: Sequence[str], root: Path = ROOT) -> int | None:
    """Commits that changed this code since the part passed; None where git cannot tell: no repository, or
    history without that commit.
    """
    if git("rev-parse", "--is-shallow-repository", root=root) != "false":
        return None
    counted = git("rev-list", "--count", "--no-merges", f"{entry['since']}..HEAD", "--", *covers, root=root)
    return int(counted) if counted else None


def git(*words: str, root: Path = ROOT) -> str:
    """What git prints, or "" if it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    words = sys.argv[1:]
    part = words.pop(0) if words and not words[0].startswith("-") else ""
    try:
        names = chosen(part)
    except ValueError as wrong:
        sys.exit(str(wrong))
    sys.exit(max([run(name, words) for name in names]))
