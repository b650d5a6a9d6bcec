"""Executes every Mosaic kernel that ships, as it ships, without a GPU; and kernels with planted faults.

    python -m benchmarks.executed_kernels [--quick] [--targets TARGET ...] [--only PATTERN]

Needs the extra `aot`. A kernel's row has its largest error against the reference, in parts of the largest
number of the result; instructions of warps that a run executes; lines of its PTX and how many of them any run
executed; and seconds of a run, with the machine's load. Where a kernel's PTX for a card is that for another
one but for the card's name, it is not executed again: its row names the other one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "4")  # threads of XLA: a kernel that it calls takes one
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # references need not be fast

from benchmarks.machine import RESULTS, ROOT, save

sys.path.append(str(ROOT / "tools"))  # as pytest does

from tests.kernels import shipped
from tests.kernels.executed import FEW, Executed, anonymous
from tests.kernels.faults import FAULTS, ON_AMPERE, ON_BLACKWELL, Report, reports_of
from tools.ptx_machine.capture import Compiled


def every(cases: shipped.Cases, more: shipped.Cases) -> shipped.Cases:
    """Cases, and those of long tests."""
    return {kernel: of | more.get(kernel, {}) for kernel, of in cases.items()}


AMPERE = every(shipped.AMPERE, shipped.MORE_AMPERE)
NVFP4 = {name: check for name, check in AMPERE["product"].items() if "NVFP4" in name}
TARGETS: dict[str, tuple[shipped.Cases, tuple[str, ...]]] = {
    "h200": (
        every(shipped.CASES, shipped.MORE) | {"product": NVFP4},
        ("decode", "prefill", "product", "scaled product", "MXFP4 product", "int4 product"),
    ),
    "a100": (AMPERE, ON_AMPERE),
    "rtx5090": (AMPERE, ()),
    "rtx3090": (AMPERE, ()),
    "l4": (AMPERE, ()),
    "b200": (AMPERE | every(shipped.BLACKWELL, shipped.MORE_BLACKWELL), ON_BLACKWELL),
}
ALIKE = {"rtx3090": "a100", "l4": "a100", "b200": "rtx5090"}  # whose PTX may be the same


def digest(kernels: Sequence[Compiled]) -> str:
    return hashlib.sha256(anonymous(kernels).encode()).hexdigest()[:16]


def executed(kernel: str, name: str, target: str, digests: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    check, place = TARGETS[target][0][kernel][name], {"kernel": kernel, "case": name, "target": target}
    runs = Executed(FEW, target)
    if digests and digest(runs.compiled(check)) == (ptx := digests.get((kernel, name))):
        return {**place, "same_as": ALIKE[target], "ptx": ptx}
    error = check(runner=runs.runner)
    first = runs.runs[0]
    [(_, covered, lines)] = {(kernel, covered, lines) for kernel, covered, lines in runs.covered()}
    return {
        **place,
        "ptx": digest(runs.calls[0][0].kernels),
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


def rows(
    target: str, quick: bool, only: str, digests: Mapping[tuple[str, str], str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Kernels and faults. A process compiles for one compute capability.

    Args:
        digests: of the PTX that was executed for the target of `ALIKE`.
    """
    cases, victims = TARGETS[target]
    kernels = []
    for kernel, checks in cases.items():
        for name in [name for name in checks if re.search(only, f"{kernel}, {name}")][: 1 if quick else None]:
            kernels.append(executed(kernel, name, target, digests))
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
    before = json.loads((RESULTS / "executed_kernels.json").read_text())
    kernels, faults = before["kernels"], before["faults"]
    cases = [
        (t, kernel, case) for t, (of, _) in TARGETS.items() for kernel, names in of.items() for case in names
    ]
    planted = [(fault.kernel, fault.name) for fault in FAULTS]
    for target in args.targets:
        alike = [row for row in kernels if row["target"] == ALIKE.get(target)]
        digests = {(row["kernel"], row["case"]): row.get("ptx", "") for row in alike}
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            more, told = pool.submit(rows, target, args.quick, args.only, digests).result()
        if not args.quick:  # what was not run keeps its row
            kernels = merged(kernels, more, cases, "target", "kernel", "case")
            faults = merged(faults, told, planted, "kernel", "fault")
            save("executed_kernels", {"kernels": kernels, "faults": faults})


if __name__ == "__main__":
    main()
