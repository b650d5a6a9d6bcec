"""The kernels' own tuning, where there is any."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.gpu.rows import ROOT, Row, failed, skipped

MODULE = "pallas_kernels.tune"


def measure(small: bool) -> Iterator[Row]:
    if importlib.util.find_spec(MODULE) is None:
        yield skipped(MODULE, "there is no such module yet")
        return
    if small:
        yield skipped(MODULE, "needs a GPU")
        return
    start = time.perf_counter()
    ran = subprocess.run([sys.executable, "-m", MODULE], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ran.stdout)
    seconds = {"s": time.perf_counter() - start}
    yield failed(MODULE, ran.stdout.strip()[-600:], **seconds) if ran.returncode else Row(MODULE, seconds, outcome="ok")
