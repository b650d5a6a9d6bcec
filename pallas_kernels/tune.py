"""Measures the best number of stages for decode attention on this machine's GPU and writes it to the table
that `tuning` reads.

    python -m pallas_kernels.tune [--heads 32 --kv-heads 8 --head-dim 128] [--page-size 64] [--dtype bfloat16]
    [--out FILE]

The options give one shape of attention (the heads on one device). Without --heads, the shapes of Llama 8B and
70B are measured. For each shape, each of the engine's row buckets and each kind of cache is timed with
sequences of 8k tokens, and with one of 32k among short ones, with a cache of 1 GiB. FILE is written after
each case, and cases that it lacks for this device come first, so an interrupted run can be continued.

If flashinfer-python is installed, its decode kernel is timed too, and the times are written to `--fastest`:
`impl="auto"` uses the faster kernel.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from pallas_kernels import compare, dispatch, fastest, tuning
from pallas_kernels.attention_decode import paged_attention_decode
from pallas_kernels.devices import visible_devices
from pallas_kernels.options import AttentionOptions
from pallas_kernels.timing import chain, seconds
from pallas_kernels.tuning import DecodeCase, DecodeChoice
from pallas_kernels.tuning_cases import SHAPES, arrays, cases

STAGES = (2, 3, 4, 6)
WORTH = 0.98  # another choice must take at most this share of the default's time

Timer = Callable[[DecodeCase, DecodeChoice], float]


@dataclass(frozen=True)
class Measured:
    """Seconds of the default choice and of the best one."""

    case: DecodeCase
    default: float
    choice: DecodeChoice
    best: float


def search(cases: Iterable[DecodeCase], timer: Timer) -> Iterator[Measured]:
    """Measures the best number of stages for each case."""
    for case in cases:
        default = DecodeChoice()
        times = {choice: timer(case, choice) for choice in (default, *map(DecodeChoice, STAGES))}
        best = min(times, key=times.__getitem__)
        chosen = best if times[best] <= WORTH * times[default] else default
        yield Measured(case, times[default], chosen, times[chosen])


def tune(cases: Iterable[DecodeCase], device: jax.Device, file: Path) -> Iterator[Measured]:
    """Runs `search` and adds each result to the file at once. Cases that the file lacks come first."""
    known = _read(file).get(device.device_kind, {})
    for measured in search(sorted(cases, key=lambda case: case.key() in known), total_seconds):
        if math.isfinite(measured.best):
            table = tuning.updated(_read(file), device.device_kind, {measured.case: measured.choice})
            file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        yield measured


def _read(file: Path) -> tuning.Table:
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def total_seconds(case: DecodeCase, choice: DecodeChoice) -> float:
    """Total seconds of a call with each of the case's loads, on the default device; infinity if the choice
    does not fit.
    """
    q, k, v, loads = arrays(case)
    attend = partial(paged_attention_decode, options=AttentionOptions(case.head_dim**-0.5), choice=choice)
    program = chain(lambda q, tables, k, v, lengths: attend(q, k, v, tables, lengths))
    try:
        return sum(seconds(program, q, load.tables, k, v, load.lengths) for load in loads)
    except Exception as error:  # too little shared memory: a ValueError, or the driver's own error
        print(f"left out: {choice}: {str(error).splitlines()[0]}")
        return math.inf


def row(measured: Measured) -> str:
    gain = measured.default / measured.best
    times = f"{measured.default * 1e6:.1f} | {measured.best * 1e6:.1f} | {gain:.2f}"
    return f"| {measured.case.key()} | {times} | {measured.choice.stages or ''} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--heads", type=int, help="query heads on one device; with --kv-heads and --head-dim")
    parser.add_argument("--kv-heads", type=int, help="kv heads on one device")
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page; default: %(default)s")
    parser.add_argument(
        "--dtype",
        choices=dispatch.DTYPES,
        default="bfloat16",
        help="dtype of the queries; default: %(default)s",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=tuning.FILE,
        help="file to write; entries of other devices and shapes are kept",
    )
    parser.add_argument(
        "--fastest",
        type=Path,
        default=fastest.FILE,
        help="file for times by implementation; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    shape = (options.heads, options.kv_heads, options.head_dim)
    if None in shape and any(shape):
        parser.error("--heads, --kv-heads and --head-dim go together")
    shapes: list[tuple[int, int, int]] = SHAPES if None in shape else [shape]
    [device, *_] = visible_devices()
    if getattr(device, "compute_capability", None) not in dispatch.HOPPER:
        parser.exit(
            1,
            f"device={device.device_kind}: tuning needs a Hopper GPU (compute capability"
            f" {dispatch.HOPPER[0]})\n",
        )
    print("| case | default, us | best, us | gain | stages |\n|---|---|---|---|---|")
    wanted = [case for shape in shapes for case in cases(*shape, options.page_size, options.dtype)]
    for measured in tune(wanted, device, options.out):
        print(row(measured), flush=True)
    _compare(wanted, device, options.fastest)


def _compare(wanted: list[DecodeCase], device: jax.Device, file: Path) -> None:
    refused = compare.why_not(device, wanted[0])
    if refused is not None:
        return print(f"\nnot compared with FlashInfer's kernel: {refused}")
    tuning.table.cache_clear()  # read the new measurements
    print(f"\n| case | {', us | '.join(compare.IMPLS)}, us |\n|---|---|---|")
    for case, times in compare.compare(wanted, device, file):
        print(compare.row(case, times), flush=True)


if __name__ == "__main__":
    main()
