"""Results of a server benchmark. Names are those of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jengine.base.errors import InvalidArgument

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(slots=True)
class ClientRecord:
    """A request as seen by its client, in seconds since the beginning of the benchmark.

    Attributes:
        due: time at which it should be sent. Waiting because of max_concurrency counts.
        times: times of responses, and the number of tokens in each.
        error: why it failed; empty if it succeeded.
    """

    due: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    error: str = ""

    @property
    def output_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.due

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.due

    @property
    def tpot(self) -> float | None:
        """None if there is a single token."""
        later = self.output_tokens - self.tokens[0]
        return (self.times[-1] - self.times[0]) / later if later else None

    @property
    def itl(self) -> list[float]:
        """Times between tokens. Tokens that arrive together share the time."""
        gaps = zip(self.times, self.times[1:], self.tokens[1:], strict=False)
        return [(after - before) / count for before, after, count in gaps for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Result:
    """Measurements of a server.

    Args:
        seconds: from the first request to the last token.
        goodput: limits in milliseconds, for ttft, tpot and e2el.
        percentiles: percentiles to show.
    """

    answers: Sequence[ClientRecord]
    seconds: float
    goodput: Mapping[str, float] = field(default_factory=dict)
    percentiles: Sequence[float] = (99,)
    metrics: Sequence[str] = ("ttft", "tpot", "itl")

    @property
    def good(self) -> list[ClientRecord]:
        """Successful requests."""
        return [answer for answer in self.answers if not answer.error and answer.times]

    def to_dict(self) -> dict[str, Any]:
        """In the format of `vllm bench serve --save-result`."""
        good, seconds = self.good, max(self.seconds, 1e-9)
        inputs, outputs = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
        out: dict[str, Any] = {
            "duration": self.seconds,
            "completed": len(good),
            "failed": len(self.answers) - len(good),
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "request_throughput": len(good) / seconds,
            "output_throughput": outputs / seconds,
            "total_token_throughput": (inputs + outputs) / seconds,
        }
        if self.goodput:
            out["request_goodput"] = sum(self._in_time(answer) for answer in good) / seconds
        for name in self.metrics:
            values = 1e3 * np.array(self.values(name) or [0.0])
            spread = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
            out |= {f"{kind}_{name}_ms": float(value) for kind, value in spread.items()}
            out |= {f"p{rank:g}_{name}_ms": float(np.percentile(values, rank)) for rank in self.percentiles}
        return out

    def values(self, name: str) -> list[float]:
        """Values of all successful requests, in seconds."""
        if name == "itl":
            return [gap for answer in self.good for gap in answer.itl]
        return [value for answer in self.good if (value := getattr(answer, name)) is not None]

    def _in_time(self, answer: ClientRecord) -> bool:
        return all((getattr(answer, name) or 0.0) * 1e3 <= limit for name, limit in self.goodput.items())

    def __str__(self) -> str:
        facts = self.to_dict()
        lines = [f"{' Serving Benchmark Result ':=^50}"]
        names = {
            "completed": "Successful requests:",
            "failed": "Failed requests:",
            "duration": "Benchmark duration (s):",
            "total_input_tokens": "Total input tokens:",
            "total_output_tokens": "Total generated tokens:",
            "request_throughput": "Request throughput (req/s):",
            "request_goodput": "Request goodput (req/s):",
            "output_throughput": "Output token throughput (tok/s):",
            "total_token_throughput": "Total token throughput (tok/s):",
        }
        lines += [_line(title, facts[name]) for name, title in names.items() if name in facts]
        for name in self.metrics:
            lines.append(f"{TITLES[name]:-^50}")
            for kind in ("mean", "median", *[f"p{rank:g}" for rank in self.percentiles]):
                shown = kind.title() if kind.isalpha() else kind.upper()
                lines.append(_line(f"{shown} {name.upper()} (ms):", facts[f"{kind}_{name}_ms"]))
        return "\n".join([*lines, "=" * 50])

    def save_plot(self, path: Path) -> None:
        """Distributions of the latencies, and tokens over time. Needs matplotlib.

        Raises:
            InvalidArgument: matplotlib is missing, or the file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise InvalidArgument.needs_extra("plot", str(path), "bench") from None
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name in self.metrics:
            values = np.sort(1e3 * np.array(self.values(name) or [0.0]))
            left.plot(values, np.linspace(0, 100, len(values)), label=TITLES[name])
        left.set(xlabel="ms", ylabel="percent of requests", xscale="log")
        news = [pair for answer in self.good for pair in zip(answer.times, answer.tokens, strict=True)]
        times = np.repeat([time for time, _ in news], [count for _, count in news])
        bins = max(int(self.seconds), 10)
        counts, edges = np.histogram(times, bins=bins, range=(0.0, max(self.seconds, 1e-9)))
        right.stairs(counts / (edges[1] - edges[0]), edges)
        right.set(xlabel="seconds", ylabel="tokens a second", ylim=(0, None))
        for axes in (left, right):
            axes.grid(alpha=0.3)
        left.legend(fontsize=8)
        try:
            figure.savefig(path, dpi=90)
        except (OSError, ValueError) as error:
            raise InvalidArgument("plot", str(path), f"cannot be written: {error}") from None


def _line(title: str, value: float) -> str:
    return f"{title:<40} {value:<9.2f}" if isinstance(value, float) else f"{title:<40} {value:<9}"
