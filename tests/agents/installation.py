"""Installs the agents into a folder of their own, from npm and PyPI."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
PYTHON, NODE = HERE / "requirements.txt", HERE / "package.json"


def installed() -> Path:
    """The folder that AGENTS_FOLDER names, or .cache/agents, with `node_modules`, `venv` and the scripts.
    An existing installation of the same versions is used again.

    Raises:
        CalledProcessError: something cannot be installed.
    """
    folder = Path(os.environ.get("AGENTS_FOLDER", HERE.parent.parent / ".cache" / "agents")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be installing
        _once(folder / "node.ready", NODE, _install_node)
        _once(folder / "python.ready", PYTHON, _install_python)
        for script in (HERE / "scripts").iterdir():
            shutil.copy(script, folder)  # node looks for packages beside a script
    return folder


def _once(stamp: Path, versions: Path, install: Callable[[Path], None]) -> None:
    wanted = hashlib.sha256(versions.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        install(stamp.parent)
        stamp.write_text(wanted)


def _install_node(folder: Path) -> None:
    """No script of a package runs: programs come as packages of their own, also node."""
    shutil.copy(NODE, folder)
    words = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
    subprocess.run(words, cwd=folder, check=True, env=_plain(folder))


def _install_python(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder / "venv"], check=True)
    words = ["-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "-r", PYTHON]
    subprocess.run([folder / "venv" / "bin" / "python", *words], check=True, env=_plain(folder))


def _plain(folder: Path) -> dict[str, str]:
    """The environment for installers, without the variables of jengine's own environment."""
    removed = ("PYTHON", "VIRTUAL_ENV", "PIP_CONSTRAINT", "COVERAGE")
    return {name: value for name, value in os.environ.items() if not name.startswith(removed)}
