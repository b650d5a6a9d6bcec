"""Executes every Mosaic kernel that ships, as it ships, without a GPU; and kernels with planted faults.

    python -m benchmarks.executed_kernels [--quick] [--targets TARGET ...] [--only PATTERN]

Needs the extra `aot`. A kernel's row has its largest error against the reference, in parts of the largest
number of the result; instructions of warps that a run executes; lines of its PTX and how many of them any run
executed; and seconds of a run, with the machine's load.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "4")  # threads of XLA: a kernel that it calls takes one
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # references need not be fast

from benchmarks.machine import RESULTS, ROOT, save

sys.path.append(str(ROOT / "tools"))  # as pytest does

from tests.kernels import shipped
from tests.kernels.executed import FEW, Executed
from tests.kernels.faults import FAULTS, Report, reports_of

NVFP4 = {name: check for name, check in shipped.AMPERE["product"].items() if "NVFP4" in name}
TARGETS: dict[str, tuple[shipped.Cases, tuple[str, ...]]] = {
    "h200": (
        shipped.CASES | {"product": NVFP4},
        ("decode", "prefill", "product", "scaled product", "MXFP4 product"),
    ),
    "a100": (shipped.AMPERE, ("Ampere", "Ampere, int8 cache", "Ampere product")),
    "rtx5090": (shipped.AMPERE, ()),
}


def executed(kernel: str, name: str, target: str) -> dict[str, Any]:
    cases, _ = TARGETS[target]
    runs = Executed(FEW, target)
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


def rows(target: str, quick: bool, only: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Kernels and faults. A process compiles for one compute capability."""
    cases, victims = TARGETS[target]
    kernels = []
    for kernel, checks in cases.items():
        for name in [name for name in checks if re.search(only, f"{kernel}, {name}")][: 1 if quick else None]:
            kernels.append(executed(kernel, name, target))
            print(kernels[-1], flush=True)
    some = [victim for victim in victims if re.search(only, f"faults, {victim}")]
    return kernels, [*_faults(target, some[-1:] if quick else some)]


def _faults(target: str, victims: Iterable[str]) -> Iterator[dict[str, Any]]:
    for victim in victims:
        faults = [fault for fault in FAULTS if fault.kernel == victim]
        for fault, report in zip(faults, reports_of(victim, faults, target), strict=True):
            yield (row := reported(report, fault.name))
            print(row, flush=True)


def merged(
    old: list[dict[str, Any]], new: list[dict[str, Any]], order: Sequence[tuple[str, ...]], *keys: str
) -> list[dict[str, Any]]:
    """New rows, and old ones with other keys, in this order of keys. Rows with keys that are not in it go."""
    every = {tuple(row[key] for key in keys): row for row in [*old, *new]}
    return [every[place] for place in order if place in every]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first case of each kernel, nothing saved")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS], help="these only")
    parser.add_argument(
        "--only", default="", help='of "KERNEL, CASE" and "faults, VICTIM", what this matches'
    )
    args = parser.parse_args()
    kernels, faults = list[dict[str, Any]](), list[dict[str, Any]]()
    for target in args.targets:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            more, told = pool.submit(rows, target, args.quick, args.only).result()
        kernels += more
        faults += told
    if not args.quick:  # what was not run keeps its row
        before = json.loads((RESULTS / "executed_kernels.json").read_text())
        cases = [
            (t, kernel, case)
            for t, (of, _) in TARGETS.items()
            for kernel, names in of.items()
            for case in names
        ]
        planted = [(fault.kernel, fault.name) for fault in FAULTS]
        kernels = merged(before["kernels"], kernels, cases, "target", "kernel", "case")
        faults = merged(before["faults"], faults, planted, "kernel", "fault")
        save("executed_kernels", {"kernels": kernels, "faults": faults})


if __name__ == "__main__":
    main()
