"""Static checks of the Dockerfiles: references that must exist here, and unsafe instructions."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from jengine import EngineConfig, cli
from jengine.serving.config import KINDS, PREFIX

ROOT = Path(__file__).parent.parent.parent
INSTRUCTIONS = {
    "FROM", "WORKDIR", "RUN", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT",
}  # fmt: skip


def instructions(name: str) -> list[tuple[str, str]]:
    """Instruction and arguments, in order; lines that go on joined, comments left out."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in whole.splitlines() if line]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_dockerfile(name: str) -> None:
    steps = instructions(name)
    assert {step for step, _ in steps} == INSTRUCTIONS
    bases = [what.split()[0] for step, what in steps if step == "FROM"]
    assert bases and all(re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base) for base in bases), (
        "a base that moves"
    )

    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for step, what in steps:
        if step == "COPY" and not what.startswith("--from"):
            for source in what.split()[:-1]:
                assert (ROOT / source).exists() and f"!{source}" in ignored, (
                    f"{source} is not sent to the build"
                )

    last = {step: what for step, what in steps}
    assert last["USER"].isdecimal() and int(last["USER"]) >= 1000, "runs as root"
    assert json.loads(last["ENTRYPOINT"]) == ["jengine", "serve"], "a shell would not pass SIGTERM on"
    assert [*map(int, last["EXPOSE"].split())] == [8000, 50051]
    command = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    assert command[:2] == ["python", "-m"] and find_spec(command[2]) is not None
    variables = [pair.partition("=") for pair in shlex.split(last["ENV"])]
    ours = {
        variable.removeprefix(PREFIX).lower(): value
        for variable, _, value in variables
        if variable.startswith(PREFIX)
    }
    assert ours["host"] == "0.0.0.0" and set(ours) <= set(KINDS), (
        "the server refuses a variable that it does not know"
    )
    assert ours["cache_dir"].startswith(last["VOLUME"])


def test_they_differ_in_what_cuda_needs() -> None:
    cpu, cuda = (instructions(name) for name in ("Dockerfile", "Dockerfile.cuda"))
    cpu.remove(demo_programs())
    assert [step for step, _ in cpu] == [step for step, _ in cuda]
    changed = [(before[1], after[1]) for before, after in zip(cpu, cuda, strict=True) if before != after]
    assert len(changed) == 3 and all(
        "cuda12" in after or "NVIDIA_VISIBLE_DEVICES" in after for _, after in changed
    )


def demo_programs() -> tuple[str, str]:
    [step] = [step for step in instructions("Dockerfile") if step[0] == "RUN" and "jengine serve" in step[1]]
    return step


def test_the_image_has_the_programs_that_its_server_loads() -> None:
    """The image's user compiles them with a server's options, before the folder becomes a volume."""
    steps = instructions("Dockerfile")
    place = steps.index(demo_programs())
    names = [step for step, _ in steps]
    assert max(at for at, name in enumerate(names) if name == "USER") < place < names.index("VOLUME")
    command = demo_programs()[1]
    started = command.partition(" &")[0].split()
    options = cli._parser().parse_args(started[1:])
    given = {
        name: value for name, value in vars(options).items() if name in EngineConfig.__dataclass_fields__
    }
    assert given == {"model": "demo", "warm_up": "all"}, (
        "otherwise its programs are others than a plain start's"
    )
    assert subprocess.run(["sh", "-nc", command]).returncode == 0


@pytest.mark.parametrize("ready", [True, False])
def test_the_image_build_waits_for_the_server(ready: bool, tmp_path: Path) -> None:
    """The step, with stand-ins for its commands. It stops the server when that is ready, and fails if the
    server ends before.
    """
    scripts = {
        "jengine": "trap 'touch stopped; exit 0' TERM; sleep 0.2; touch up; while :; do sleep 0.1; done"
        if ready
        else "exit 3",
        "python": "test -e up",
        "sleep": f"exec {shutil.which('sleep')} 0.1",
    }
    for name, script in scripts.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", demo_programs()[1]], cwd=tmp_path, env=env, capture_output=True, timeout=60
    )
    assert (done.returncode == 0) == ready == (tmp_path / "stopped").exists(), done
