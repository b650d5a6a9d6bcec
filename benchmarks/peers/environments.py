"""Prepares the peers' Python environments and weights, once, under .cache/peers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.peers.registry import ENVIRONMENTS, WEIGHTS, Environment
from pallas_kernels.llvm.max_isa import limit

PEERS_FOLDER = (ROOT / ".cache" / "peers").resolve()
REQUIREMENTS = """
from importlib.metadata import requires
print(*(r for r in requires({name!r}) if not r.startswith({without!r}) and "extra ==" not in r), sep="\\n")
"""


class Unavailable(Exception):
    """An environment or weights could not be prepared; gives the reason."""


def environment_python(name: str) -> Path:
    """The Python of an environment, which is created if it is missing or was created from other packages.

    What is compiled here for this processor has another environment for an older one.
    """
    wanted = ENVIRONMENTS[name]
    variables = as_avx2_only() if wanted.compiled and limit() else {}
    folder = PEERS_FOLDER / "environments" / (f"{name}-avx2" if variables else name)
    ready, python = folder / ".ready", folder / "bin" / "python"
    if not (ready.exists() and ready.read_text() == repr(wanted)):
        print(f"installing {name}", flush=True)
        found = _run([str(ROOT / "tools" / "find_python"), "3.11"], name)
        _run([found.strip(), "-m", "venv", "--clear", str(folder)], name)
        _install(python, name, wanted, variables)
        ready.write_text(repr(wanted))
    return python


def _install(python: Path, name: str, wanted: Environment, variables: dict[str, str]) -> None:
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for packages in wanted.installs:
        _run([*pip, "install", *(["--no-cache-dir"] if wanted.compiled else []), *packages], name, variables)
    if wanted.alone:
        _run([*pip, "install", "--no-deps", wanted.alone], name)
        code = REQUIREMENTS.format(name=wanted.alone.split("==")[0], without=wanted.without)
        requirements = _run([str(python), "-c", code], name).split("\n")
        _run([*pip, "install", *wanted.installs[0], *filter(None, (r.strip() for r in requirements))], name)
    if wanted.remove:
        _run([*pip, "uninstall", "--yes", *wanted.remove], name)


def weights_folder(name: str, model: Path) -> Path:
    """The folder of weights in a peer's format, converted from the model if missing. An empty name is the
    model's own format."""
    if not name:
        return model
    folder = PEERS_FOLDER / "weights" / model.name / name
    if not folder.exists():
        wanted, partial = WEIGHTS[name], folder.with_name(f"{name}.partial")
        source = weights_folder(wanted.source, model)
        print(f"converting to {name}", flush=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        scripts = environment_python(wanted.environment).parent
        first, *rest = (part.format(model=source.resolve(), out=partial) for part in wanted.command)
        _run([str(scripts / first), *rest], name)
        partial.rename(folder)
    return folder


@cache
def as_avx2_only() -> dict[str, str]:
    """Variables of a process that takes its processor for one with AVX2 only, by a library built from
    avx2_only.c. XLA's flag does not limit the libraries that XLA calls.

    Raises:
        Unavailable: there is no C compiler, or CPUID cannot fault.
    """
    source, library = Path(__file__).with_name("avx2_only.c"), PEERS_FOLDER / "avx2_only.so"
    PEERS_FOLDER.mkdir(parents=True, exist_ok=True)
    _run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], "avx2_only")
    variables = {
        "LD_PRELOAD": str(library),
        "XLA_FLAGS": re.sub(r"--xla_cpu_max_isa=\w+", "", os.environ.get("XLA_FLAGS", "")),
    }
    _run(["true"], "avx2_only", variables)
    return variables


def _run(command: list[str], name: str, variables: dict[str, str] | None = None) -> str:
    """The command's output; the complete log is kept in logs/. Raises Unavailable with its last line if it
    fails.
    """
    log = PEERS_FOLDER / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["nice", "-n", "19", *command],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    log.write_text(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise Unavailable(f"{name}: {last} (the whole is in {log})")
    return done.stdout
