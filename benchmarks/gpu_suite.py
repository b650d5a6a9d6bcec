"""Tests and benchmarks of the kernels and the engine on a real GPU: correctness first, then the achieved
share of the hardware's limits.

    python -m benchmarks.gpu_suite [PART ...] [--programs DIR] [--minutes NUMBER] [--out FILE]

correctness   every kernel against float32; runs first, unless FILE has results for these kernels
decode        decode attention: bytes a second relative to the device's own copies; equal rows, padding,
              ragged batches
prefill       prefill attention: operations a second relative to the device's own matrix products;
              other libraries
experts       products of tokens with their experts' weights: correctness; then relative to the device's
              copies and matrix products
products      the same of dense quantized weights
programs      programs compiled without a GPU (`--programs DIR`), and by another process on this one: loaded
              and run
answers       the demo model: log probabilities compared with float32 on a CPU; equal bits in other batches
features      every feature of the engine, compared with the engine without it or with a CPU
rollouts      a GRPO loop with a Llama of 1B parameters: an engine and a trainer on one device
several       on several GPUs: answers of a model that they share, all-reduces by size, a step of the 8B
engine        a Llama with 8B parameters, or 1B if they do not fit, random weights: decoding and prefilling
              relative to the roofline, and the host's time
transformers  the same Llama in transformers
beside        jengine and vLLM with the same models and requests, each case with its own limit; only if named.
              Environment: VLLM_PYTHON, the Python that has vLLM; MODELS, folders or shapes, with commas

Each part runs in a separate process for at most 8 minutes, several for 10 and beside for two hours;
`--minutes` limits all of them together. Results go to FILE after each case, by part, with those of earlier
runs: FILE's own or, if it is new, the repository's. So a run that is killed leaves its results. The exit
status is 1 if anything failed. Without a GPU, XLA's implementations replace the kernels at the smallest
sizes, and nothing is saved unless FILE is given: this only tests the suite itself.

Only programs, answers, features, rollouts and engine need jengine's dependencies. On a machine without
network access, `pip install --target DIR` the packages reported as missing elsewhere, and put DIR on
PYTHONPATH. `--programs DIR` uses a folder compiled for this device (`jengine compile --target h100` or h200)
with the same version of JAX.

benchmarks/gpu/README.md lists the commands for a GPU that is new to the kernels, in order.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu import rows
from benchmarks.gpu.rows import Row
from benchmarks.machine import facts

PARTS = (
    "correctness", "decode", "prefill", "experts", "products", "programs", "answers", "features", "rollouts",
    "several", "engine", "transformers", "beside",
)  # fmt: skip
SHARING = (
    "programs",
    "answers",
    "features",
    "rollouts",
    "several",
    "beside",
    "prefill",
    "transformers",
)  # parts in which JAX must leave GPU memory to others
LIMITS = {"several": 600.0, "beside": 7200.0}  # seconds of a part
LIMIT = 480.0  # of others. No further case is started after LAST_START of it
LAST_START = 7 / 8
ALONE = "beside", "several"  # need no kernel's correctness: they compare their own answers, or none
ENDED = "the part was ended from outside"
PACKAGES = (
    "jax-cuda13-pjrt", "jax-cuda12-pjrt", "nvidia-cudnn-cu13", "flax", "torch", "transformers", "tokamax",
)  # fmt: skip


def measure(part: str, small: bool, programs: Path | None) -> Iterator[Row]:
    """Yields a part's rows as they are found. Modules are imported here, since some need additional
    packages.
    """
    module: Any = importlib.import_module(
        "benchmarks.gpu." + ("transformers_peer" if part == "transformers" else part)
    )
    more: dict[str, tuple[Any, ...]] = {"programs": (programs,)}
    yield from module.measure(*more.get(part, (small,)))


def run_part(
    part: str, file: Path, programs: Path | None, save: Path | None = None, limit: float = LIMIT
) -> None:
    """Measures in this process. Files are written after each row, so a crash loses at most one.

    Args:
        save: a second file to write, on a GPU only.
        limit: seconds after which this process is ended.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if part in SHARING:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if part == "several":
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
    import jax

    from pallas_kernels.devices import skip_cuda_check

    skip_cuda_check()
    small = jax.default_backend() != "gpu"
    if small:
        print(f"{part}: no GPU here, smallest sizes in XLA's forms; the figures mean nothing", flush=True)
    results, found, start = rows.read(file), list[Row](), time.monotonic()

    def keep(stopped: str | None) -> None:
        new = rows.merged(results, part, facts() | {"packages": versions()}, found, stopped)
        for out in [file] if small or save is None else [file, save]:
            rows.write(out, new)

    keep(ENDED)
    try:
        for row in measure(part, small, programs):
            found.append(row)
            keep(ENDED)
            if time.monotonic() - start > LAST_START * limit:
                return keep(f"its {LAST_START * limit:.0f} s were over")
    except ImportError as error:
        found.append(rows.skipped(part, rows.reason(error)))
    except Exception as error:  # a device or a compiler may raise anything; earlier results are kept
        found.append(rows.failed(part, rows.reason(error)))
    keep(None)


def versions() -> dict[str, str]:
    """Versions of installed packages on which results depend."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def start_part(part: str, file: Path, programs: Path | None, save: Path | None, limit: float) -> int:
    """Runs a part in a separate process, prints its results, and returns the number of failed cases. See
    `run_part`.
    """
    more = [] if programs is None else ["--programs", str(programs.absolute())]
    more += [] if save is None else ["--save", str(save)]
    more += [f"--limit={limit}"]
    start = time.monotonic()
    before = rows.read(file).get(part)
    command = [sys.executable, "-m", "benchmarks.gpu_suite", part, "--here", "--out", str(file), *more]
    child = subprocess.Popen(command, cwd=rows.ROOT, start_new_session=True)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            # and what it has started, which would run beside the next part
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    results = rows.read(file)
    print(f"\n{part}, {time.monotonic() - start:.0f} s")
    if results.get(part) == before:
        print("ended before it began")
        return 1
    print(rows.table(results[part]["rows"]))
    if "stopped" in results[part]:
        print(f"not all cases were run: {results[part]['stopped']}")
    print(flush=True)
    return rows.failures(results, part) + int(results[part].get("stopped") == ENDED)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", metavar="PART", nargs="*", help=", ".join(PARTS))
    parser.add_argument(
        "--programs",
        metavar="DIR",
        type=Path,
        help="a folder that `jengine compile` wrote; the part programs prints how",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help=f"default: {rows.RESULTS.relative_to(rows.ROOT)}, on a GPU"
    )
    parser.add_argument("--minutes", metavar="NUMBER", type=float, help="of all parts together, at most")
    parser.add_argument("--limit", type=float, default=LIMIT, help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if options.here:
        run_part(options.parts[0], options.out, options.programs, options.save, options.limit)
        return 0
    parts = options.parts or [part for part in PARTS if part != "beside"]
    with tempfile.TemporaryDirectory() as temporary:
        named = None if options.out is None else options.out.absolute()
        known = rows.read(named if named is not None and named.exists() else rows.RESULTS)
        file, save = (Path(temporary) / "results.json", rows.RESULTS) if named is None else (named, None)
        rows.write(file, known)
        if not {"correctness", *ALONE}.intersection(parts):
            if not rows.checked(known):
                parts = ["correctness", *parts]
            elif count := rows.failures(known, "correctness"):
                print(f"these kernels are known to be wrong: {count} cases of the part correctness failed")
        failed, end = {}, time.monotonic() + 60 * (options.minutes or math.inf)
        for i, part in enumerate(parts):
            limit = min(LIMITS.get(part, LIMIT), (end - time.monotonic()) / (len(parts) - i))
            failed[part] = start_part(part, file, options.programs, save, limit)
    for part, count in failed.items():
        print(f"{part}: {count or 'none'} failed")
    return 1 if any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
