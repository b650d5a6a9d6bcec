"""Executes every Mosaic kernel that ships, as it ships, without a GPU; and kernels with planted faults.

    python -m benchmarks.executed_kernels [--quick] [--targets TARGET ...]

Needs the extra `aot`. A kernel's row has its largest error against the reference, in parts of the largest
number of the result; instructions of warps that a run executes; lines of its PTX and how many of them any run
executed; and seconds of a run, with the machine's load.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "4")  # threads of XLA: a kernel that it calls takes one

from benchmarks.machine import RESULTS, ROOT, save

sys.path.append(str(ROOT / "tools"))  # as pytest does

from tests.compiling import quickly_compiled
from tests.kernels import shipped
from tests.kernels.executed import FEW, Executed
from tests.kernels.faults import FAULTS, Report, reports_of

TARGETS = {
    "h200": (shipped.CASES, ("decode", "prefill", "product", "scaled product")),
    "a100": (shipped.AMPERE, ("Ampere", "Ampere, int8 cache", "Ampere product")),
    "rtx5090": (shipped.AMPERE, ()),
}


def executed(kernel: str, name: str, target: str) -> dict[str, Any]:
    cases, _ = TARGETS[target]
    runs = Executed(FEW, target)
    with quickly_compiled():
        error = cases[kernel][name](runner=runs.runner)
    first = runs.runs[0]
    [(_, covered, lines)] = {(kernel, covered, lines) for kernel, covered, lines in runs.covered()}
    return {
        "kernel": kernel,
        "case": name,
        "target": target,
        "grid": first.launch.grid,
        "threads": first.launch.block[0],
        "instructions": max(run.result.instructions for run in runs.runs),
        "executed_lines": covered,
        "lines": lines,
        "seconds": round(sum(run.seconds for run in runs.runs) / len(runs.runs), 2),
        "schedules": len(runs.runs),
        "error": float(f"{error:.2g}"),
    }


def reported(report: Report | None, name: str) -> dict[str, Any]:
    if report is None:
        return {"fault": name, "kernel": "", "told": "nothing"}
    first = next((finding for finding in report.findings if report.fault.told == finding.kind), None)
    return {
        "fault": name,
        "kernel": report.fault.kernel,
        "told": report.fault.told,
        "message": "" if first is None else first.message.split("\n")[0],
        "line": 0 if first is None else first.line,
        "source": "" if first is None else first.source.removeprefix(f"{ROOT}/"),
        "schedule": report.schedule.order,
    }


def rows(target: str, quick: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Kernels and faults. A process compiles for one compute capability."""
    cases, victims = TARGETS[target]
    kernels = []
    for kernel, checks in cases.items():
        for name in [*checks][: 1 if quick else None]:
            kernels.append(executed(kernel, name, target))
            print(kernels[-1], flush=True)
    return kernels, [*_faults(target, victims[-1:] if quick else victims)]


def _faults(target: str, victims: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for victim in victims:
        faults = [fault for fault in FAULTS if fault.kernel == victim]
        for fault, report in zip(faults, reports_of(victim, faults, target), strict=True):
            yield (row := reported(report, fault.name))
            print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first case of each kernel, nothing saved")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, help="these only; others keep their rows")
    args = parser.parse_args()
    quick, targets = args.quick, args.targets or [*TARGETS]
    kernels, faults = list[dict[str, Any]](), list[dict[str, Any]]()
    if args.targets and not quick:
        before = json.loads((RESULTS / "executed_kernels.json").read_text())
        kernels = [row for row in before["kernels"] if row["target"] not in targets]
        victims = {victim for target in targets for victim in TARGETS[target][1]}
        faults = [row for row in before["faults"] if row["kernel"] not in victims]
    for target in targets:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            more, told = pool.submit(rows, target, quick).result()
        kernels += more
        faults += told
    if not quick:
        save("executed_kernels", {"kernels": kernels, "faults": faults})


if __name__ == "__main__":
    main()
