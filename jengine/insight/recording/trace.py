"""Records of an engine's recent steps and requests, for Perfetto and for `explain`."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from jengine.base.display import counted, image_html, table_html
from jengine.base.errors import InvalidArgument
from jengine.insight.recording.perfetto import trace_events
from jengine.insight.recording.records import EngineFacts, Machine, Memory, Pause, RequestRecord, StepRecord
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.table.program_table import ProgramTable

VERSION = 1


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
        readers: for a server's trace.
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
        """A PNG: each request from arrival to end, the contents of steps, and the pages of the cache. Needs
        matplotlib.
        """
        from jengine.insight.recording.plot import plot_trace

        return plot_trace(self.steps, self.requests, self.taken, self.step_costs.table.tile_size)

    def _repr_html_(self) -> str:
        known = [step for step in self.steps if step.device]
        device, predicted = sum([step.device for step in known]), sum([step.predicted for step in known])
        rows = sum([step.trunk.rows * step.steps for step in self.steps])
        drafts, accepted = sum([s.drafts for s in self.steps]), sum([s.accepted for s in self.steps])
        shown = [
            ("trace", repr(self)),
            ("generated", f"{sum([s.generated for s in self.steps]):,} tokens"),
            (
                "prefill",
                f"{sum([s.prompt_tokens + s.prompt_rows for s in self.steps]):,} tokens of prompts",
            ),
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
