"""The GPU suite of jengine's repository on this machine: a report for others, without names."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PARTS = "correctness", "decode", "products", "engine"


def suite_folder() -> Path:
    """The folder with the package `benchmarks`: a wheel's copy, or the checkout."""
    package = Path(__file__).parents[2]
    return package / "suite" if (package / "suite").is_dir() else package.parent


def report(file: Path, minutes: float) -> int:
    """Runs the suite and writes its results. Returns its exit code: 1 if a case failed.

    Args:
        file: continued if it exists.
        minutes: at most, for all parts together.
    """
    file = file.absolute()
    if not file.exists():
        file.write_text("{}\n")
    command = [sys.executable, "-m", "benchmarks.gpu_suite", *PARTS, f"--minutes={minutes}", f"--out={file}"]
    code = subprocess.run(command, cwd=suite_folder(), check=False).returncode
    file.write_text(json.dumps(without_names(json.loads(file.read_text())), indent=1) + "\n")
    return code


def without_names(value: Any) -> Any:
    """Results whose texts, such as errors, have no folder, user or host."""
    if isinstance(value, dict):
        return {name: without_names(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_names(each) for each in value]
    if not isinstance(value, str):
        return value
    names = {socket.gethostname(), os.path.basename(os.path.expanduser("~"))} - {"", "~"}
    with suppress(KeyError, OSError):  # containers may know no name of their user
        names.add(getpass.getuser())
    text = re.sub(r"(?<![\w.])[~/](?:[^\s/:'\"]+/|/)*(?=[^\s/:'\"]*)", "", value)
    return re.sub(rf"\b(?:{'|'.join(map(re.escape, names))})\b", "NAME", text)
