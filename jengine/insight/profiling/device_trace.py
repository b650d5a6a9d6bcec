"""Figures from a capture of jax.profiler, in Chrome's trace event format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

OPERATIONS, GAPS = 25, 5  # maximum numbers that are listed
# Idle time between kernels of one program is launch latency; the host starts a program after a longer one.
LAUNCH_GAP = 20e-6


class DeviceGap(msgspec.Struct, array_like=True):
    """Idle times of a device between two kernels, by their names."""

    before: str
    after: str
    count: int
    seconds: float


class DeviceTimes(msgspec.Struct, array_like=True):
    """A GPU's time from the start of its first kernel or copy in the capture to the end of the last.

    Attributes:
        device: such as "GPU:0".
        seconds: duration of that period.
        computing: seconds with a kernel.
        copying: seconds with a copy and no kernel.
        launching: idle seconds in gaps up to LAUNCH_GAP.
        waiting: idle seconds in longer gaps: for the host.
        kernels: number of kernels.
        gaps: the pairs of kernels with the longest idle time between them in longer gaps.
    """

    device: str
    seconds: float
    computing: float
    copying: float
    launching: float
    waiting: float
    kernels: int
    gaps: list[DeviceGap]


def operations_of(trace: Mapping[str, Any]) -> list[tuple[str, int, float]]:
    """(name, count, seconds) of the most expensive operations: of the GPUs' kernels and copies, or of all
    threads if there is no GPU.
    """
    streams = _streams(trace)
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for event in _events(trace):
        if not streams or (event["pid"], event["tid"]) in streams:
            counts[event["name"]] += 1
            seconds[event["name"]] += 1e-6 * event["dur"]
    longest = sorted(seconds, key=lambda name: -seconds[name])[:OPERATIONS]
    return [(name[:120], counts[name], seconds[name]) for name in longest]


def device_times(trace: Mapping[str, Any]) -> list[DeviceTimes]:
    """The times of each GPU with kernels in the capture."""
    streams = _streams(trace)
    of_device: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for event in _events(trace):
        if device := streams.get((event["pid"], event["tid"])):
            start = 1e-6 * event["ts"]
            of_device[device].append((start, start + 1e-6 * event["dur"], event["name"]))
    return [_times(device, sorted(events)) for device, events in sorted(of_device.items())]


def _times(device: str, events: list[tuple[float, float, str]]) -> DeviceTimes:
    kernels = [event for event in events if not event[2].startswith(("Memcpy", "Memset"))]
    computing, busy = _covered(kernels), _covered(events)
    launching = waiting = 0.0
    gaps: dict[tuple[str, str], tuple[int, float]] = {}
    last = events[0]  # the event that ends last so far
    for event in events:
        idle = event[0] - last[1]
        if idle > LAUNCH_GAP:
            waiting += idle
            count, seconds = gaps.get((last[2], event[2]), (0, 0.0))
            gaps[last[2], event[2]] = count + 1, seconds + idle
        else:
            launching += max(idle, 0.0)
        last = max(last, event, key=lambda either: either[1])
    longest = sorted(gaps.items(), key=lambda item: -item[1][1])[:GAPS]
    return DeviceTimes(
        device,
        last[1] - events[0][0],
        computing,
        busy - computing,
        launching,
        waiting,
        len(kernels),
        [DeviceGap(before[:120], after[:120], *gap) for (before, after), gap in longest],
    )


def _covered(events: list[tuple[float, float, str]]) -> float:
    """Seconds with at least one of the events, which are sorted."""
    seconds, until = 0.0, 0.0
    for start, end, _ in events:
        seconds += max(end - max(start, until), 0.0)
        until = max(until, end)
    return seconds


def _events(trace: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for event in trace.get("traceEvents", ()):
        if event.get("ph") == "X":
            yield {"pid": 0, "tid": 0, "ts": 0.0, "dur": 0.0, **event}


def _streams(trace: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """The GPUs' streams, as (pid, tid), and the device of each. A device has further lanes, which repeat its
    kernels by module and by operation.
    """
    devices: dict[int, str] = {}
    lanes: list[tuple[int, int]] = []
    for event in trace.get("traceEvents", ()):
        if event.get("ph") == "M":
            name = str(event.get("args", {}).get("name", ""))
            if event.get("name") == "process_name" and name.startswith("/device:GPU"):
                devices[event["pid"]] = name.removeprefix("/device:")
            elif event.get("name") == "thread_name" and name.startswith("Stream #"):
                lanes.append((event["pid"], event["tid"]))
    return {lane: devices[lane[0]] for lane in lanes if lane[0] in devices}
