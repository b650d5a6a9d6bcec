"""Builds Prometheus metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

# a millisecond to about eight minutes
SECONDS = tuple(factor * 10.0**power for power in range(-3, 3) for factor in (1, 2.5, 5))
# one to half a million
TOKENS = tuple(float(factor * 10**power) for power in range(6) for factor in (1, 2, 5))


class Histogram:
    """Counts by bucket."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it); the last one includes all."""
        out, total = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], list(self.counts), strict=True):
            total += count
            out.append((bound, float(total)))
        return out


class Families:
    """Metrics of one model, whose name is a label of each.

    Names (after the prefix) and meanings follow vLLM where it has the same metric.

    Args:
        prefix: of the names, such as "jengine:".
    """

    def __init__(self, model: str, prefix: str) -> None:
        self.model, self.prefix = model, prefix

    def gauge(self, name: str, help: str, value: float) -> Metric:
        return self.gauges(name, help, (), [((), value)])

    def gauges(
        self, name: str, help: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
    ) -> Metric:
        """A gauge for each set of label values."""
        return self._filled(
            GaugeMetricFamily(self.prefix + name, help, labels=("model_name", *labels)), values
        )

    def counter(self, name: str, help: str, value: float) -> Metric:
        return self.counters(name, help, (), [((), value)])

    def counters(
        self, name: str, help: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
    ) -> Metric:
        """A counter for each set of label values."""
        return self._filled(
            CounterMetricFamily(self.prefix + name, help, labels=("model_name", *labels)), values
        )

    def histogram(self, name: str, help: str, values: Histogram) -> Metric:
        return self.buckets(name, help, values.cumulative(), values.sum)

    def buckets(self, name: str, help: str, cumulative: Sequence[tuple[str, float]], total: float) -> Metric:
        """A histogram from cumulative counts by upper bound; `total` is the sum of its values."""
        family = HistogramMetricFamily(self.prefix + name, help, labels=("model_name",))
        family.add_metric((self.model,), cumulative, total)
        return family

    def _filled(
        self, family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[Sequence[str], float]]
    ) -> Metric:
        for labels, value in values:
            family.add_metric((self.model, *labels), value)
        return family
