"""Tunes the kernels. Each case is saved at once, because tuning all cases takes longer than the time limit of
a part.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax

from benchmarks.gpu.rows import Row, skipped
from pallas_kernels import compare, dispatch, fastest, tune, tuning, tuning_cases


def measure() -> Iterator[Row]:
    """Measures the cases that are missing in the kernels' tables, and adds them like `python -m
    pallas_kernels.tune`.

    So a run continues where an earlier one ended. Empty the tables to measure everything again.
    """
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) not in dispatch.HOPPER:
        yield skipped("decode attention", f"device={device.device_kind}: tuning needs a Hopper GPU")
        return
    cases = [case for shape in tuning_cases.SHAPES for case in tuning_cases.cases(*shape)]
    tuned, timed = (fastest.read(file).get(device.device_kind, {}) for file in (tuning.FILE, fastest.FILE))
    for measured in tune.tune([case for case in cases if case.key() not in tuned], device, tuning.FILE):
        values = {
            "default us": 1e6 * measured.default,
            "best us": 1e6 * measured.best,
            "gain": measured.default / measured.best,
        }
        choice = {"stages": measured.choice.stages or ""}
        yield Row(measured.case.key(), values | choice)
    refused = compare.why_not(device, cases[0])
    if refused is not None:
        yield skipped("FlashInfer beside ours", refused)
        return
    tuning.table.cache_clear()  # read the new measurements
    for case, times in compare.compare(
        [case for case in cases if compare.key(case) not in timed], device, fastest.FILE
    ):
        yield Row(case.key(), {f"{impl} us": time for impl, time in times.items()})
