"""Host memory needed to convert a model, and to load it from safetensors or converted, each in a new process.

    python -m benchmarks.convert_memory [--shape 1b] [--quick]

On a CPU, device memory is host memory: the part that a load leaves there is the model itself, and is listed
separately. A process's own (anonymous) memory is distinguished from the pages of mapped files, which the
system can reclaim. A thread samples both every millisecond. Needs Linux, and twice the model's size on the
disk for temporary files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, save

MB = 1e6
LOADS = [("bfloat16", 1), ("float32", 1), ("bfloat16", 2)]  # dtype, devices


class Watch:
    """Peaks of this process's memory, in bytes above the initial value."""

    def __init__(self) -> None:
        self.before = self.peak = self.now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            now = self.now()
            self.peak = {kind: max(self.peak[kind], now[kind]) for kind in now}

    def end(self) -> dict[str, int]:
        self._ended.set()
        self._thread.join()
        return {kind: self.peak[kind] - self.before[kind] for kind in self.peak}

    @staticmethod
    def now() -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        return {"own": 1024 * int(fields["RssAnon"][0]), "mapped": 1024 * int(fields["RssFile"][0])}


def child_convert(model: str, out: str) -> None:
    from jengine.checkpoints import convert

    import_orbax()
    watch, start = Watch(), time.perf_counter()
    convert(model, out, progress=False)
    print(json.dumps({"seconds": time.perf_counter() - start, "device": 0, **watch.end()}))


def child_load(model: str, dtype: str, devices: int) -> None:
    import jax

    from jengine.checkpoints import load, read_config
    from jengine.models import build
    from jengine.parallel.mesh import make_mesh

    import_orbax()
    declared, mesh = build(read_config(Path(model)), dtype, 64), make_mesh(devices)
    watch, start = Watch(), time.perf_counter()
    params = load(Path(model), declared, mesh, progress=False)
    seconds = time.perf_counter() - start
    # copies count
    shards = [shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
    print(json.dumps({"seconds": seconds, "device": sum(shards), **watch.end()}))


def import_orbax() -> None:
    """Imports Orbax before memory is measured, for both ways of loading, since its code should not count."""
    from orbax.checkpoint import v1  # noqa: F401


def run(call: str, devices: int = 1) -> dict[str, Any]:
    code = f"from benchmarks.convert_memory import child_convert, child_load; {call}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    seconds = told.pop("seconds")
    megabytes = {name: round(value / MB) for name, value in told.items()}
    return {"seconds": round(seconds, 1), **megabytes, "beyond": megabytes["own"] - megabytes["device"]}


def measure(shape: str) -> dict[str, Any]:
    from tools.make_model import make_model

    with tempfile.TemporaryDirectory() as folder:
        model, out = f"{folder}/model", f"{folder}/converted"
        make_model(shape, Path(model), seed=0)
        file = (Path(model) / "model.safetensors").stat().st_size
        rows = {"convert": run(f"child_convert({model!r}, {out!r})")}
        for dtype, devices in LOADS:
            for name, source in (("safetensors", model), ("converted", out)):
                row = f"load {name} as {dtype}" + (f", {devices} devices" if devices > 1 else "")
                rows[row] = run(f"child_load({source!r}, {dtype!r}, {devices})", devices)
        stored = sum(entry.stat().st_size for entry in Path(out).rglob("*") if entry.is_file())
    largest = 2 * largest_parameter(shape)
    print(
        f"\n{shape}: {file / MB:.0f} MB of bfloat16 safetensors, largest parameter {largest / MB:.0f};"
        f" converted {stored / MB:.0f}"
    )
    print(f"\npeaks in MB{'':32}{'own':>8}{'device':>8}{'beyond':>8}{'mapped':>8}{'seconds':>9}")
    for name, row in rows.items():
        print(
            f"{name:43}{row['own']:8}{row['device']:8}{row['beyond']:8}{row['mapped']:8}{row['seconds']:9.1f}"
        )
    return {
        "file": round(file / MB),
        "largest_parameter": round(largest / MB),
        "converted": round(stored / MB),
        "peaks": rows,
    }


def largest_parameter(shape: str) -> int:
    """Elements of the largest parameter: gate and up are one parameter."""
    from tools.make_model import SHAPES

    config = SHAPES[shape]
    return int(config["hidden_size"]) * max(int(config["vocab_size"]), 2 * int(config["intermediate_size"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=("134m", "1b", "8b"), default="1b")
    parser.add_argument("--quick", action="store_true", help="the 134m shape, nothing saved")
    options = parser.parse_args()
    shape = "134m" if options.quick else options.shape
    result = measure(shape)
    if not options.quick:
        save("convert_memory", {"shape": shape, **result})


if __name__ == "__main__":
    main()
