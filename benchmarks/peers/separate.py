"""Runs one of the workers here under a peer's own Python."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.peers.environments import PEERS_FOLDER, environment_python
from benchmarks.peers.registry import PEERS

TIMEOUT = 900  # seconds of one process


def run_separate(peer: str, worker: str, task: dict[str, Any]) -> Any:
    """What `benchmarks.peers.WORKER` writes to the file `result`, from a task in JSON on its standard input.
    Its output is in a log among the peer's.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    python = environment_python(peer)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    variables = {
        name: value.format(environment=python.parent.parent, cores=cores)
        for name, value in PEERS[peer].variables.items()
    }
    log = PEERS_FOLDER / "logs" / f"{worker} {peer}.log"
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        result = Path(folder) / "result.json"
        subprocess.run(
            [str(python), "-m", f"benchmarks.peers.{worker}"],
            input=json.dumps({**task, "result": str(result)}),
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=True,
        )
        return json.loads(result.read_text())
