"""The kernels' own tuning, case by case, each of them kept at once: all of it takes longer than a part may."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from benchmarks.gpu.rows import Row, skipped
from pallas_kernels import dispatch, tune, tuning


def measure() -> Iterator[Row]:
    """Writes to the table that the kernels read, as `python -m pallas_kernels.tune` does; goes on where an earlier run ended."""
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) not in dispatch.HOPPER:
        yield skipped("decode attention", f"device={device.device_kind}: tuning needs a Hopper GPU")
        return
    for measured in tune.tune([case for shape in tune.SHAPES for case in tune.cases(*shape)], device, tuning.FILE):
        values = {"default us": 1e6 * measured.default, "best us": 1e6 * measured.best, "gain": measured.default / measured.best}
        choice = {"stages": measured.choice.stages or ""}
        yield Row(measured.case.key(), values | choice)
