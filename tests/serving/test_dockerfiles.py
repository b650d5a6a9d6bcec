"""Static checks of the Dockerfiles: references that must exist here, and unsafe instructions."""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

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
    assert [step for step, _ in cpu] == [step for step, _ in cuda]
    changed = [(one[1], other[1]) for one, other in zip(cpu, cuda, strict=True) if one != other]
    assert len(changed) == 3 and all(
        "cuda12" in other or "NVIDIA_VISIBLE_DEVICES" in other for _, other in changed
    )
