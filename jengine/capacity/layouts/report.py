"""Shows a choice of layouts: as text, as plain data, and as a plot."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from jengine.base.display import columns, counted
from jengine.base.errors import InvalidArgument
from jengine.capacity.layouts.choice import NAMES, Candidate, Choice
from jengine.capacity.layouts.deployment import Deployment
from jengine.capacity.layouts.memory import GIB
from jengine.capacity.layouts.serving import Point

SHOWN = 10  # layouts in the table
WIDTH = 110
HEAD = (
    "layout",
    "cache GiB",
    "fit",
    "run",
    "ms/token",
    "first ms",
    "tokens/s/device",
    "decode ms",
    "prefill tokens/s",
    "waits most for",
)


def report(choice: Choice) -> str:
    """Text for a terminal."""
    serving = [one for one in choice.candidates if one.best]
    lines = [f"{choice.model} on {setting(choice)}", _traffic(choice), ""]
    if serving:
        lines += [columns(HEAD, [_row(one) for one in serving[:SHOWN]]), ""]
    lines += textwrap.wrap(choice.verdict, WIDTH)
    lines += [line for line in (_start(choice),) if line]
    others = [(one.deployment, choice.why(one)) for one in choice.candidates if one is not choice.best]
    if others:
        lines += ["", "Others:", *_reasons(others[: SHOWN - 1])]
        more = len(others) - SHOWN + 1
        lines += [f"  and {counted(more, 'slower layout')}, which --json has"] if more > 0 else []
    if choice.refused:
        lines += ["", "Not possible:", *_reasons(choice.refused)]
    return "\n".join([*lines, "", *textwrap.wrap(_sources(choice), WIDTH)])


def setting(choice: Choice) -> str:
    """Devices and number formats."""
    cluster, group = choice.cluster, choice.group
    model, formats = group.spec.model, group.formats
    dtypes = f"weights {model.quantized or formats.dtype}, cache {group.spec.cache_dtype}"
    hosts = f" on {cluster.hosts} hosts" if cluster.hosts > 1 else ""
    return f"{cluster.count} x {cluster.device.name}{hosts}: {dtypes}"


def plain(choice: Choice) -> dict[str, Any]:
    """A dict for JSON."""
    traffic, cluster = choice.traffic, choice.cluster
    return {
        "model": choice.model,
        "device": cluster.device.name,
        "devices": cluster.count,
        "hosts": cluster.hosts,
        "traffic": dataclasses.asdict(traffic),
        "verdict": choice.verdict,
        "layouts": [_plain(choice, one) for one in choice.candidates],
        "refused": [{**_names(deployment), "why": why} for deployment, why in choice.refused],
    }


def save_plot(path: Path, choice: Choice) -> None:
    """Plots tokens a second of a device against the time per token, for as many sequences as fit, and the
    points that no other layout beats in both.

    Raises:
        InvalidArgument: matplotlib is missing, or cannot write this file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgument("plot", str(path), "needs matplotlib, which is in the extra bench") from None
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lines = {one.deployment: [*one.serving.points()] for one in choice.candidates if one.serving.fits}
    best = frontier([point for points in lines.values() for point in points])
    for deployment, points in lines.items():
        on_it = any(point in best for point in points)
        axes.plot(
            [1e3 * point.tpot for point in points],
            [point.per_device for point in points],
            label=str(deployment) if on_it else None,
            color=None if on_it else "0.85",
            zorder=2 if on_it else 1,
        )
    axes.scatter(
        [1e3 * point.tpot for point in best], [point.per_device for point in best], s=12, color="k", zorder=3
    )
    if choice.traffic.tpot_ms is not None:
        axes.axvline(choice.traffic.tpot_ms, color="0.5", linestyle="--")
    axes.set(xscale="log", xlabel="ms per output token", ylabel="output tokens/s per device, at most")
    axes.set_title(f"{choice.model} on {setting(choice)}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidArgument("plot", str(path), f"cannot be written: {error}") from None


def frontier(points: list[Point]) -> list[Point]:
    """Points that no other one beats in both time per token and throughput, the fastest token first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.tpot, -point.per_device)):
        if not kept or point.per_device > kept[-1].per_device:
            kept.append(point)
    return kept


def _row(one: Candidate) -> tuple[str, ...]:
    point, serving = one.best, one.serving
    assert point is not None
    total = sum(point.causes.values())
    return (
        str(one.deployment),
        f"{one.memory.pages * one.memory.page / GIB:.1f}",
        f"{serving.fits:,}",
        f"{point.sequences:,}",
        f"{1e3 * point.tpot:.1f}",
        f"{1e3 * point.ttft:,.0f}",
        f"{point.per_device:,.0f}",
        f"{1e3 * serving.decode(point.sequences):.1f}",
        f"{serving.prefill:,.0f}",
        f"{NAMES[point.bound]} {point.causes[point.bound] / total:.0%}",
    )


def _start(choice: Choice) -> str:
    """How to start the best layout, or the best of those that can be started."""
    per_host = choice.cluster.per_host
    possible = [one for one in choice.candidates if one.best and not one.deployment.unavailable(per_host)]
    if not possible or choice.best is None:
        return ""
    unavailable = choice.best.deployment.unavailable(per_host)
    servers = possible[0].deployment.replicas if possible[0].deployment.layout.expert_parallel else 1
    start = f"Start {servers} servers with" if servers > 1 else "Start with"
    prefix = f"jengine does not take {unavailable} yet. The best that it can start:" if unavailable else start
    return f"{prefix} {' '.join(_flags(possible[0]))}"


def _flags(one: Candidate) -> list[str]:
    """Options of `jengine serve`."""
    assert one.best is not None
    layout, replicas = one.deployment.layout, one.deployment.replicas
    rows = -(-one.best.sequences // layout.data)
    options = one.deployment.options | {"max_num_seqs": rows}
    if layout.data > 1:  # limits are those of each rank
        options["max_num_batched_tokens"] = rows + one.serving.budget // layout.data
    if replicas > 1 and not layout.expert_parallel:
        options["data_parallel_size"] = replicas
    named = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    return [flag if value is True else f"{flag} {value}" for flag, value in named]


def _reasons(others: list[tuple[Deployment, str]]) -> list[str]:
    return [f"  {deployment}: {why}" for deployment, why in others]


def _traffic(choice: Choice) -> str:
    traffic = choice.traffic
    named = ((traffic.ttft_ms, "to the first token"), (traffic.tpot_ms, "per further token"))
    targets = [f"at most {value:g} ms {what}" for value, what in named if value is not None]
    lengths = f"prompts of {traffic.prompt:,} tokens, outputs of {traffic.output:,}"
    return "; ".join([lengths, *targets])


def _sources(choice: Choice) -> str:
    device, cluster = choice.cluster.device, choice.cluster
    network = (
        f", {device.network / 1e9:.0f} GB/s between hosts ({device.network_name})"
        if cluster.hosts > 1
        else ""
    )
    return (
        "Speeds are bounds and not measurements: each part of a layer at the data sheet's rates"
        f" ({device.bandwidth / 1e12:.2f} TB/s of memory, {device.link / 1e9:.0f} GB/s in a host"
        f" ({device.link_name}){network}), one after the other, with NCCL's latencies of collectives. fit,"
        " run and prefill are of one engine: the sequences that its cache holds, those that meet the targets,"
        " and its fastest prefill. cache GiB is of each device, and tokens/s/device counts output tokens."
    )


def _plain(choice: Choice, one: Candidate) -> dict[str, Any]:
    point, serving = one.best, one.serving
    memory = {field.name: getattr(one.memory, field.name) for field in dataclasses.fields(one.memory)}
    known: dict[str, Any] = {
        **_names(one.deployment),
        "memory": memory,
        "sequences": serving.fits,
        "alone_ms": 1e3 * serving.alone.tpot,
        "prefill_tokens_per_second": serving.prefill,
        "point": None,
        "why": None if one is choice.best else choice.why(one),
    }
    if point is not None:
        figures = dataclasses.asdict(point)
        flags = None if one.deployment.unavailable(choice.cluster.per_host) else _flags(one)
        known |= {"point": figures, "decode_ms": 1e3 * serving.decode(point.sequences), "flags": flags}
    return known


def _names(deployment: Deployment) -> dict[str, Any]:
    return {
        "layout": str(deployment),
        **dataclasses.asdict(deployment.layout),
        "replicas": deployment.replicas,
    }
