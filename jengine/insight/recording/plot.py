"""Plots a trace: each request from arrival to end, the contents of steps, and the pages by state. Needs
matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from jengine.insight.recording.records import RequestRecord, StepRecord

WAITING, PREFILL, DECODE = "#c9ced6", "#e0962f", "#3f8fd6"
USED, CACHED, FREE = "#3f8fd6", "#aab4c2", "#eceff3"
MOST_LANES, MOST_STEPS = 64, 2000  # maximum numbers drawn; the most recent ones are kept


def plot_trace(
    steps: Sequence[StepRecord], requests: Sequence[RequestRecord], taken: float, tile_size: int
) -> bytes:
    """A PNG of three plots with a common time axis: requests in lanes, tokens of steps with padding, pages by
    state.

    Args:
        taken: time of the trace, at which unfinished requests end in the plot.
    """
    from matplotlib.figure import Figure

    steps, requests = steps[-MOST_STEPS:], sorted(requests, key=lambda request: request.arrival)[-MOST_LANES:]
    height = 1.0 + 0.09 * max(len(requests), 8)
    figure = Figure(figsize=(10, height + 3.2), layout="constrained")
    lanes, tokens, pages = figure.subplots(3, 1, sharex=True, height_ratios=[height, 1.4, 1.4])
    begun = min([step.begun for step in steps[:1]] + [request.arrival for request in requests], default=0.0)
    _lanes(lanes, requests, begun, taken)
    _tokens(tokens, steps, begun, tile_size)
    _pages(pages, steps, begun)
    pages.set_xlabel("seconds")
    for axes in (lanes, tokens, pages):
        axes.margins(x=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=90)
    return file.getvalue()


def _lanes(axes: Any, requests: Sequence[RequestRecord], begun: float, taken: float) -> None:
    """Waiting, prefill and decoding of each request."""
    parts: dict[str, tuple[list[int], list[float], list[float]]] = {
        name: ([], [], []) for name in ("waiting", "prefill", "decode")
    }
    for lane, request in enumerate(requests):
        end = request.ended or taken
        times = [request.arrival, request.scheduled or end, request.first_token or end, end]
        for (lanes, starts, widths), (start, stop) in zip(parts.values(), pairwise(times), strict=True):
            lanes.append(lane)
            starts.append(start - begun)
            widths.append(max(stop - start, 0.0))
    for (name, (lanes, starts, widths)), colour in zip(
        parts.items(), (WAITING, PREFILL, DECODE), strict=True
    ):
        axes.barh(lanes, widths, left=starts, height=0.75, color=colour, label=name)
    axes.set(ylabel="requests", yticks=[])
    axes.invert_yaxis()


def _tokens(axes: Any, steps: Sequence[StepRecord], begun: float, tile_size: int) -> None:
    """Computed tokens of each step, stacked, with padding in grey."""
    at, width = [step.begun - begun for step in steps], [max(step.ended - step.begun, 1e-9) for step in steps]
    bottom = [0] * len(steps)
    series = (
        ("rows", DECODE, [step.rows - step.prompt_rows for step in steps]),
        ("prompts", PREFILL, [step.prompt_tokens + step.prompt_rows for step in steps]),
        ("padding", WAITING, [step.padded_rows + step.padded_tokens(tile_size) for step in steps]),
    )
    for name, colour, counts in series:
        axes.bar(at, counts, width, bottom=bottom, align="edge", color=colour, label=name, linewidth=0)
        bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    axes.set_ylabel("tokens of a step")


def _pages(axes: Any, steps: Sequence[StepRecord], begun: float) -> None:
    """Owned, cached and free pages over time."""
    at = [step.ended - begun for step in steps]
    states = [[step.owned for step in steps], [step.cached for step in steps], [step.free for step in steps]]
    axes.stackplot(at, states, labels=["in use", "cached", "free"], colors=[USED, CACHED, FREE], step="post")
    axes.set_ylabel("pages")
