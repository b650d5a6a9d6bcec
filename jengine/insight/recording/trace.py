"""Records of an engine's recent steps and requests, for Perfetto, for `explain` and as a plot."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from jengine.base.display import counted, image_html, table_html
from jengine.base.errors import InvalidArgument
from jengine.insight.recording.perfetto import trace_events
from jengine.insight.recording.records import EngineFacts, Machine, Memory, Pause, RequestRecord, StepRecord
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.table.program_table import ProgramTable

VERSION = 1
WAITING, PREFILL, DECODE = "#c9ced6", "#e0962f", "#3f8fd6"
USED, CACHED, FREE = "#3f8fd6", "#aab4c2", "#eceff3"
MOST_LANES, MOST_STEPS = 64, 2000  # maximum numbers drawn; the most recent ones are kept


class Readers(msgspec.Struct):
    """How a server's clients read their streams.

    Attributes:
        streams: number of open streams.
        waiting: number of these in which a write is waiting for the client.
        longest: the longest of these waits in seconds.
    """

    streams: int = 0
    waiting: int = 0
    longest: float = 0.0


class Trace(msgspec.Struct, kw_only=True):
    """An engine's recent activity. `save` it and open the file at https://ui.perfetto.dev, or `explain` it.

    Attributes:
        taken: time of the trace on the clock of the records; unix: the same in seconds since 1970.
        facts: options of the engine.
        costs: step costs, as read by `step_costs`.
        steps: in the order in which they ran.
        requests: finished ones, then running or waiting ones.
        pauses: longer pauses by Python's garbage collector.
        memories, machines: samples of the engine process's memory, and of processors; all that are known, not
            only for this period.
        readers: how a server's clients read their streams; None in the library.
    """

    taken: float
    unix: float
    facts: EngineFacts
    costs: msgspec.Raw
    steps: list[StepRecord] = []
    requests: list[RequestRecord] = []
    pauses: list[Pause] = []
    memories: list[Memory] = []
    machines: list[Machine] = []
    readers: Readers | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        self.costs = msgspec.Raw(bytes(self.costs))  # a decoded one would keep all of its message alive

    @classmethod
    def empty(cls, facts: EngineFacts) -> Trace:
        """The trace of an engine without records."""
        table = ProgramTable.build(
            max_num_seqs=facts.max_num_seqs, max_num_batched_tokens=facts.max_num_batched_tokens, tile_size=64
        )
        return cls(
            taken=time.perf_counter(),
            unix=time.time(),
            facts=facts,
            costs=msgspec.Raw(StepCosts(table).to_json()),
        )

    @property
    def step_costs(self) -> StepCosts:
        """A copy of the engine's costs at that time."""
        return StepCosts.from_json(bytes(self.costs))

    def last(self, seconds: float) -> Trace:
        """The last `seconds` seconds of the trace."""
        since = self.taken - seconds
        return msgspec.structs.replace(
            self,
            steps=[step for step in self.steps if step.ended >= since],
            requests=[request for request in self.requests if not request.ended or request.ended >= since],
            pauses=[pause for pause in self.pauses if pause.begun >= since],
        )

    def to_json(self) -> bytes:
        """Serializes the trace for `from_json`."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Trace:
        """Raises InvalidArgument if the data is not a trace."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidArgument(
                "trace", f"{len(data)} bytes", f"is not a trace of this version of jengine: {error}"
            ) from None

    def perfetto(self) -> bytes:
        """JSON in Chrome's trace event format, for Perfetto: lanes for stages of the loop, the device and
        each request, and counters.

        The records themselves are included under `jengine`.
        """
        events = trace_events(self.steps, self.requests, self.pauses, self.step_costs.table.tile_size)
        return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "jengine": self})

    def save(self, path: str | Path) -> None:
        """Writes the output of `perfetto` to a file.

        Raises:
            InvalidArgument: the file cannot be written.
        """
        try:
            Path(path).write_bytes(self.perfetto())
        except OSError as error:
            raise InvalidArgument("path", str(path), f"cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads a file written by `save`.

        Raises:
            InvalidArgument: the file cannot be read, or is not a trace.
        """
        try:
            data = Path(path).read_bytes()
            saved = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        except OSError as error:
            raise InvalidArgument("path", str(path), f"cannot be read: {error.strerror}") from None
        except msgspec.MsgspecError:
            saved = {}
        if "jengine" not in saved:
            raise InvalidArgument("path", str(path), "was not saved by `jengine trace` or Trace.save")
        return cls.from_json(bytes(saved["jengine"]))

    def plot(self) -> bytes:
        """A PNG of three plots with a common time axis: requests from arrival to end, unfinished ones to the
        time of the trace; tokens of steps with padding; pages by state. Needs matplotlib.
        """
        from matplotlib.figure import Figure

        steps = self.steps[-MOST_STEPS:]
        requests = sorted(self.requests, key=lambda request: request.arrival)[-MOST_LANES:]
        height = 1.0 + 0.09 * max(len(requests), 8)
        figure = Figure(figsize=(10, height + 3.2), layout="constrained")
        lanes, tokens, pages = figure.subplots(3, 1, sharex=True, height_ratios=[height, 1.4, 1.4])
        begun = min(
            [step.begun for step in steps[:1]] + [request.arrival for request in requests], default=0.0
        )
        _lanes(lanes, requests, begun, self.taken)
        _tokens(tokens, steps, begun, self.step_costs.table.tile_size)
        _pages(pages, steps, begun)
        pages.set_xlabel("seconds")
        for axes in (lanes, tokens, pages):
            axes.margins(x=0)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=90)
        return file.getvalue()

    def _repr_html_(self) -> str:
        known = [step for step in self.steps if step.device]
        device, predicted = sum([step.device for step in known]), sum([step.predicted for step in known])
        rows = sum([step.trunk.rows * step.steps for step in self.steps])
        drafts, accepted = sum([s.drafts for s in self.steps]), sum([s.accepted for s in self.steps])
        shown = [
            ("trace", repr(self)),
            ("generated", f"{sum([s.generated for s in self.steps]):,} tokens"),
            ("prefill", f"{sum([s.prompt_tokens + s.prompt_rows for s in self.steps]):,} tokens of prompts"),
            ("drafts", f"{drafts:,}, of which {accepted / max(drafts, 1):.0%} were right"),
            (
                "padding",
                f"{sum([s.padded_rows * s.steps for s in self.steps]) / max(rows, 1):.0%} of the decode rows",
            ),
            (
                "device",
                f"{device:.2f} s measured, {predicted:.2f} s predicted, in {counted(len(known), 'step')}",
            ),
            (
                "images",
                f"{sum([s.patches for s in self.steps]):,} patches encoded,"
                f" {sum([s.encoder for s in self.steps]):.2f} s predicted",
            ),
            ("preemptions", f"{sum([request.preemptions for request in self.requests])}"),
        ]
        image = image_html(self.plot, "requests, steps and pages over time") if self.steps else ""
        return f"<div>{table_html(shown)}{image}</div>"

    def __repr__(self) -> str:
        seconds = self.steps[-1].ended - self.steps[0].begun if self.steps else 0.0
        return (
            f"Trace({counted(len(self.steps), 'step')} in {seconds:.1f} s,"
            f" {counted(len(self.requests), 'request')})"
        )


def _lanes(axes: Any, requests: Sequence[RequestRecord], begun: float, taken: float) -> None:
    """Waiting, prefill and decoding of each request."""
    marks = []
    for request in requests:
        end = request.ended or taken
        marks.append((request.arrival, request.scheduled or end, request.first_token or end, end))
    for part, (name, colour) in enumerate((("waiting", WAITING), ("prefill", PREFILL), ("decode", DECODE))):
        starts = [times[part] - begun for times in marks]
        widths = [max(times[part + 1] - times[part], 0.0) for times in marks]
        axes.barh([*range(len(marks))], widths, left=starts, height=0.75, color=colour, label=name)
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
