"""The machine of a measurement, saved with the result."""

from __future__ import annotations

import json
import os
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pallas_kernels.llvm.max_isa import hidden

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ROOT / ".cache" / "models"
# Features that determine the speed of products.
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def facts() -> dict[str, Any]:
    """The processor, devices, versions, time, and the load by other processes during the measurement."""
    import jax  # imported here, so that a process whose start is timed imports it together with its model

    from pallas_kernels.devices import visible_devices

    info = _cpuinfo()
    return {
        "cpu": info.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "flags": _flags(),
        "devices": [device.device_kind for device in visible_devices()],
        "used_by_others": _used_by_others(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def instruction_set() -> str:
    """The last of FLAGS that the processor has, without those that `max_isa` hides. Results of different
    instruction sets are saved separately.
    """
    return (_flags() or [platform.machine()])[-1]


def _flags() -> list[str]:
    features = _cpuinfo().get("flags", "").split()
    return [flag for flag in FLAGS if flag in features and flag not in hidden(features)]


def _busy() -> tuple[float, float]:
    """CPU seconds of the whole machine, and of this process with its ended children."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def _used_by_others() -> float | None:
    """Share of CPU time used by other processes since this module was imported; None if unknown."""
    if _START is None:
        return None
    (machine, own), since, (machine_then, own_then) = _busy(), time.monotonic() - _START[0], _START[1]
    return max(0.0, round((machine - machine_then - own + own_then) / since / (os.cpu_count() or 1), 2))


_START = (time.monotonic(), _busy()) if Path("/proc/stat").exists() else None


def save(name: str, result: dict[str, Any]) -> None:
    """Writes benchmarks/results/NAME.json, replacing an earlier one."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    file.write_text(json.dumps({"machine": facts(), **result}, indent=1) + "\n")
    print(f"\nsaved to {file.relative_to(ROOT)}")


def add(name: str, part: str | None, entries: dict[str, dict[str, Any]]) -> None:
    """Adds entries to benchmarks/results/NAME.json, or to a part of it, each with its machine."""
    file = RESULTS / f"{name}.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    own = results if part is None else results.setdefault(part, {})
    own |= {key: {"machine": facts(), **entry} for key, entry in entries.items()}
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nsaved to {file.relative_to(ROOT)}: {', '.join(entries)}")


def made_model(shape: str) -> Path:
    """The folder of a model with random weights, created by tools/make_model.py if missing."""
    from tools.make_model import make_model

    folder = MODELS / shape
    if not (folder / "model.safetensors").exists():
        make_model(shape, folder, seed=0)
    return folder


def _cpuinfo() -> dict[str, str]:
    """The first processor's entry in /proc/cpuinfo; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
