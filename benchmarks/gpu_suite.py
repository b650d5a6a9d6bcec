"""What the kernels and the engine do on a real GPU: right first, then how near they come to what the device can do.

    python -m benchmarks.gpu_suite [PART ...] [--programs DIR] [--out FILE]

correctness   every kernel against float32; goes first, unless FILE has it of these kernels already
decode        decode attention: bytes a second over the device's own copies; rows that are alike, padding, ragged batches
prefill       prefill attention: operations a second over the device's own matrix products; beside other libraries
experts       products of tokens with their experts' weights: right; then over the device's own copies and matrix products
programs      programs compiled without a GPU (`--programs DIR`), and by another process on this one: loaded and run
engine        a Llama of 8B parameters, random weights: decoding and prefilling over the roofline, and the host's time
transformers  the same Llama in transformers
tune          the kernels' tuning, as far as the time goes, into the table that they read; another run goes on from there

Each part is a process of its own and ends within 8 minutes; what it had found by then is kept. Results go to FILE, by part, beside those
of earlier runs: FILE's own or, where it is new, the repository's. The exit status is 1 if anything failed. Without a GPU, XLA's forms take
the kernels' place at the smallest sizes, and nothing is saved unless FILE is named: that shows that the suite runs, no more.

Only programs and engine need what jengine needs. Where nothing can be installed, `pip install --target DIR` elsewhere what they say is
missing, and put DIR on PYTHONPATH. `--programs DIR` takes a folder compiled for this device (`jengine compile --target h100` or h200) under
the same version of JAX.

On a GPU that is new to the kernels, go part by part, in this order:

1. `nvidia-smi`, the version of JAX and its device, then `correctness`. If all cases fail alike, JAX may find no ptxas: set CUDA_ROOT
   to /usr/local/cuda and put its bin on PATH. If all fail from one case on, the first of them broke the CUDA context; run that one alone:
     compute-sanitizer python -c "from benchmarks.gpu.correctness import *; i = 25; print(check(cases(False)[i], 'mosaic', i))"
   If prefill alone fails, look at CUDA's version: JAX's own attention refuses causal masks from CUDA 12.8.0 to 12.9.0, whose ptxas
   miscompiles them; 12.9.1 and 13 do not.
2. `decode`, `prefill` and `experts`.
3. `programs`, then `engine`. XLA first tries out its matrix products, for minutes, and `engine` may end before its first row: keep what
   XLA finds, and run it again, with XLA_FLAGS=--xla_gpu_per_fusion_autotune_cache_dir=DIR.
4. `tune`, as often as it takes; then `correctness` and `decode` once more. Programs compiled before are not for the new table.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
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

PARTS = ("correctness", "decode", "prefill", "experts", "programs", "engine", "transformers", "tune")
SHARING = ("programs", "prefill", "transformers")  # parts in which JAX leaves the GPU's memory to others
LIMIT, LAST_START = 480, 420  # seconds: a part is ended; no further case is begun
ENDED = "the part was ended from outside"
PACKAGES = ("jax-cuda13-pjrt", "jax-cuda12-pjrt", "nvidia-cudnn-cu13", "flax", "torch", "transformers", "tokamax")


def measure(part: str, small: bool, programs: Path | None) -> Iterator[Row]:
    """A part's rows as they are found. Modules are imported here: some need packages that others do not."""
    module: Any = importlib.import_module("benchmarks.gpu." + ("transformers_peer" if part == "transformers" else part))
    more: dict[str, tuple[Any, ...]] = {"programs": (programs,), "tune": ()}
    yield from module.measure(*more.get(part, (small,)))


def run_part(part: str, file: Path, programs: Path | None) -> None:
    """Measures in this process; the file is written after each row, so that what ends the process loses one at most."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if part in SHARING:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from pallas_kernels.devices import skip_cuda_check

    skip_cuda_check()
    small = jax.default_backend() != "gpu"
    if small:
        print(f"{part}: no GPU here, smallest sizes in XLA's forms; the figures mean nothing", flush=True)
    results, found, start = rows.read(file), list[Row](), time.monotonic()

    def keep(stopped: str | None) -> None:
        rows.write(file, rows.merged(results, part, facts() | {"packages": versions()}, found, stopped))

    keep(ENDED)
    try:
        for row in measure(part, small, programs):
            found.append(row)
            keep(ENDED)
            if time.monotonic() - start > LAST_START:
                return keep(f"its {LAST_START} s were over")
    except ImportError as error:
        found.append(rows.skipped(part, rows.reason(error)))
    except Exception as error:  # whatever a device or a compiler raises: what was found is kept
        found.append(rows.failed(part, rows.reason(error)))
    keep(None)


def versions() -> dict[str, str]:
    """Of the packages that are here and that figures depend on."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def start_part(part: str, file: Path, programs: Path | None) -> int:
    """Runs it in a process of its own, shows what it found, and says how many cases failed."""
    more = [] if programs is None else ["--programs", str(programs.absolute())]
    start = time.monotonic()
    before = rows.read(file).get(part)
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_suite", part, "--here", "--out", str(file), *more], cwd=rows.ROOT, timeout=LIMIT
        )
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", metavar="PART", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--programs", metavar="DIR", type=Path, help="a folder that `jengine compile` wrote; the part programs prints how")
    parser.add_argument("--out", metavar="FILE", type=Path, help=f"default: {rows.RESULTS.relative_to(rows.ROOT)}, on a GPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if options.here:
        run_part(options.parts[0], options.out, options.programs)
        return 0
    parts = options.parts or list(PARTS)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "results.json"
        known = rows.read(options.out if options.out is not None and options.out.exists() else rows.RESULTS)
        rows.write(file, known)
        if "correctness" not in parts:
            if not rows.checked(known):
                parts = ["correctness", *parts]
            elif count := rows.failures(known, "correctness"):
                print(f"these kernels are known to be wrong: {count} cases of the part correctness failed")
        failed = {}
        for part in parts:
            failed[part] = start_part(part, file, options.programs)
            results = rows.read(file)
            if options.out is not None or (part in results and results[part]["machine"]["devices"] != ["cpu"]):
                rows.write(options.out or rows.RESULTS, results)
                print(f"saved to {options.out or rows.RESULTS}", flush=True)
    for part, count in failed.items():
        print(f"{part}: {count or 'none'} failed")
    return 1 if any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
