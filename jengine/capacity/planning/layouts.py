"""The ways to spread a model over devices: what each serves, why one is best, and why others lose."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jengine.base.errors import InvalidArgument, JengineError
from jengine.capacity.planning.links import Cluster
from jengine.capacity.planning.memory import TensorGroup, layout_memory, listed
from jengine.capacity.planning.roofline import CAUSES, NAMES, Cause, Roofline
from jengine.capacity.planning.traffic import Point, Serving, Traffic
from jengine.core.config import EngineConfig
from jengine.devices.device_spec import DeviceSpec
from jengine.execution.memory import DeviceMemory
from jengine.execution.spec import ExecutionSpec
from jengine.models.stages import check_divisible, even_stages, layer_costs
from jengine.parallel.layout import OPTIONS, Layout

EXPERTS = "enable_expert_parallel"
# the most sequences in a step, and the fewest that each data rank may have, unless max_num_seqs is given
ROWS, FEWEST_ROWS = 1024, 256
ALIKE = 0.99  # of the best throughput: from here on, the engine with fewer devices is the better one


@dataclass(frozen=True, slots=True)
class Deployment:
    """Equal engines, each with 1 / replicas of the sequences, and how the devices of each share the model."""

    layout: Layout
    replicas: int = 1

    @property
    def devices(self) -> int:
        return self.replicas * self.layout.devices

    @property
    def options(self) -> dict[str, int | bool]:
        """Options of an engine with this layout that differ from the defaults."""
        sizes = {OPTIONS[axis]: getattr(self.layout, axis) for axis in OPTIONS}
        whole: dict[str, int | bool] = {EXPERTS: True} if self.layout.expert_parallel else {}
        return {name: size for name, size in sizes.items() if size > 1} | whole

    def unavailable(self, per_host: int) -> str | None:
        """The options that engines do not take together on hosts of so many devices, or None."""
        if self.layout.data > 1 and self.layout.devices > per_host:
            return "data_parallel_size with num_processes"
        return None

    def __str__(self) -> str:
        """Such as 2 stages x tensor 4, 2 replicas."""
        layout = self.layout
        axes = [
            f"{layout.stages} stages" if layout.stages > 1 else "",
            f"data {layout.data}" if layout.data > 1 else "",
            f"tensor {layout.tensor}" if layout.tensor > 1 else "",
        ]
        shared = " x ".join(filter(None, axes)) or "one device"
        whole = ", experts whole" if layout.expert_parallel else ""
        return f"{shared}{whole}" + (f", {self.replicas} replicas" if self.replicas > 1 else "")


def deployments(devices: int, *, experts: bool) -> Iterator[Deployment]:
    """All that use so many devices.

    Without experts, data ranks share nothing, so they are replicas. With experts, they share these, which
    then lie whole.
    """
    for engine in _divisors(devices):
        for stages in _divisors(engine):
            for data in _divisors(engine // stages) if experts else [1]:
                tensor = engine // stages // data
                for whole in (False, True):
                    if whole == (data > 1) or (whole and experts and tensor > 1):
                        yield Deployment(Layout(stages, data, tensor, whole), devices // engine)


def refused(layout: Layout, *, experts: int, per_host: int) -> str | None:
    """Why a model with so many experts cannot have this layout on hosts of so many devices, or None."""
    if layout.expert_shards > max(experts, 1):
        return f"more devices than the model has experts, {experts}"
    for name, size in (("tensor", layout.tensor), ("data x tensor", layout.stage_devices)):
        if size % per_host and per_host % size:
            return f"{name} {size} does not divide hosts of {per_host} devices, nor do they divide it"
    return None


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class Candidate:
    """A deployment that the devices can have.

    Attributes:
        spec: of one tensor group, as if it were an engine alone.
        copies: of each cached token, on the devices of a tensor group.
    """

    deployment: Deployment
    memory: DeviceMemory
    serving: Serving
    spec: ExecutionSpec
    copies: float

    @property
    def best(self) -> Point | None:
        return self.serving.best

    @property
    def throughput(self) -> float:
        """Output tokens a second of one device, within targets; 0: none."""
        return self.best.per_device if self.best else 0.0

    def costs(self, cause: Cause) -> float:
        """Seconds of a device for each output token, for which it waits for this."""
        assert self.best is not None
        return self.best.causes[cause] * self.serving.roofline.layout.devices / self.best.sequences


@dataclass(frozen=True)
class Choice:
    """The layouts of a model on a cluster.

    Attributes:
        group: the model on one device, whether it fits or not.
        candidates: that fit, the best first.
        refused: others, each with the reason.
    """

    cluster: Cluster
    traffic: Traffic
    group: TensorGroup
    candidates: list[Candidate]
    refused: list[tuple[Deployment, str]]

    @property
    def best(self) -> Candidate | None:
        """None: no layout meets the targets."""
        return self.candidates[0] if self.candidates and self.candidates[0].best else None

    @cached_property
    def verdict(self) -> str:
        """The best layout, its reason, and how far it is ahead of the next one."""
        best = self.best
        if best is None:
            return "No layout serves this traffic within its targets."
        assert best.best is not None
        point, others = best.best, [other for other in self.candidates[1:] if other.best]
        shares = ", ".join(f"{NAMES[cause]} {share:.0%}" for cause, share in _shares(point) if share >= 0.05)
        said = (
            f"Best: {best.deployment}, {point.per_device:,.0f} output tokens/s per device."
            f" A step waits for {shares}."
        )
        if not others:
            return said
        ahead = best.throughput / others[0].throughput - 1
        what = (
            f"{ahead:.1%} more than"
            if ahead >= 0
            else f"{-ahead:.1%} less, with fewer devices in an engine, than"
        )
        return f"{said} That is {what} {others[0].deployment}: {self.why(others[0])}."

    def why(self, other: Candidate) -> str:
        """Why a candidate is not the best one."""
        traffic = self.traffic
        if other.best is None:
            if not other.serving.fits:
                return (
                    f"the cache has no room for a sequence of {traffic.tokens:,} tokens:"
                    f" {listed(other.memory)}"
                )
            alone = other.serving.alone
            return (
                f"misses the targets even with one sequence: first token {1e3 * alone.ttft:,.0f} ms, then"
                f" {1e3 * alone.tpot:.1f} ms per token"
            )
        assert self.best is not None
        more = {cause: other.costs(cause) - self.best.costs(cause) for cause in CAUSES}
        overlapping: list[Cause] = ["memory", "products"]  # one hides the other, so they count together
        computing = max(overlapping, key=lambda cause: more[cause])
        waiting = max((cause for cause in CAUSES if cause not in overlapping), key=lambda cause: more[cause])
        cause = computing if sum(more[cause] for cause in overlapping) > more[waiting] else waiting
        if more[cause] <= 0:
            return "as fast, with more devices in an engine"
        text = (
            f"{NAMES[cause]} takes {1e6 * other.costs(cause):,.0f} us of a device per token, against"
            f" {1e6 * self.best.costs(cause):,.0f}"
        )
        if other.copies > self.best.copies and cause == "memory":
            text += f"; a cached token lies on {other.copies:.0f} devices"
        full = other.best.sequences == other.serving.fits
        return f"{text}; the cache is full with {other.serving.fits:,} sequences" if full else text


def choose(config: EngineConfig, cluster: Cluster, traffic: Traffic, *, only: Layout | None = None) -> Choice:
    """Compares all layouts of a model on a cluster.

    Args:
        config: options of the engine; its layout does not count.
        only: this layout alone, with as many replicas as there are devices for.

    Raises:
        InvalidArgument: the model or device does not support an option, or no sequence may be as long as the
            traffic's.
        ModelError: the model cannot be read, or is not supported.
    """
    cluster = dataclasses.replace(cluster, kernels=not config.batch_invariant)
    fields = EngineConfig.__dataclass_fields__
    defaults: dict[str, Any] = {name: fields[name].default for name in (*OPTIONS.values(), EXPERTS)}
    groups = _Groups(dataclasses.replace(config, **defaults), cluster.device)
    whole = groups.of(1)
    if traffic.tokens > whole.spec.max_model_len:
        limit = f"must be at most {whole.spec.max_model_len:,} tokens together, the longest sequence"
        raise InvalidArgument("traffic", f"{traffic.prompt}/{traffic.output}", limit)
    model = whole.spec.model
    experts = model.elements.experts
    every = [*deployments(cluster.count, experts=bool(experts))] if only is None else _only(only, cluster)
    candidates, without = list[Candidate](), list[tuple[Deployment, str]]()
    for deployment in every:
        why = refused(deployment.layout, experts=experts, per_host=cluster.per_host)
        if why is None:
            try:
                candidate = _candidate(groups, deployment, cluster, traffic)
            except JengineError as error:
                why = str(error)
            else:
                if candidate.memory.beside + candidate.memory.margin <= candidate.memory.limit:
                    candidates.append(candidate)
                    continue
                why = f"does not fit: {listed(candidate.memory)}"
        without.append((deployment, why))
    return Choice(cluster, traffic, whole, _ranked(candidates), without)


def _only(layout: Layout, cluster: Cluster) -> list[Deployment]:
    replicas, rest = divmod(cluster.count, layout.devices)
    if rest or not replicas:
        limit = f"must be a multiple of {layout.devices}, the devices of one engine"
        raise InvalidArgument("devices", cluster.count, limit)
    return [Deployment(layout, replicas)]


def _candidate(groups: _Groups, deployment: Deployment, cluster: Cluster, traffic: Traffic) -> Candidate:
    layout = deployment.layout
    whole, group = groups.of(1), groups.of(layout.tensor, layout.expert_parallel)
    spec, layers = group.spec, groups.layers(layout.stages)
    rows = groups.rows or max(ROWS // layout.data, FEWEST_ROWS)
    memory = layout_memory(group, layout, layers, whole, rows)
    roofline = Roofline(spec.model, group.formats, cluster, layout, layers)
    held = layout.data * (
        max(memory.pages - 1, 0) // spec.most_pages(traffic.tokens)
    )  # without the null page
    fits = min(rows * layout.data * layout.stages, held)
    budget = spec.table.max_tiles * spec.table.tile_size
    copies = layout.tensor * group.formats.kv_bytes / whole.formats.kv_bytes
    return Candidate(
        deployment,
        memory,
        Serving(roofline=roofline, traffic=traffic, fits=fits, budget=budget),
        spec,
        copies,
    )


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """The best first; of those that are nearly as fast as the fastest, the one with the fewest devices in an
    engine, since its devices wait for the fewest others.
    """
    ranked = sorted(candidates, key=lambda candidate: -candidate.throughput)
    if not ranked or not ranked[0].throughput:
        return ranked
    alike = [candidate for candidate in ranked if candidate.throughput >= ALIKE * ranked[0].throughput]
    first = min(alike, key=lambda candidate: candidate.deployment.layout.devices)
    return [first, *(candidate for candidate in ranked if candidate is not first)]


class _Groups:
    """Tensor groups by their number of devices and whether experts are whole; each is described once.

    Attributes:
        rows: max_num_seqs, if it is given.
    """

    def __init__(self, config: EngineConfig, device: DeviceSpec) -> None:
        self.rows, self._device = config.max_num_seqs, device
        self._config = dataclasses.replace(config, max_num_seqs=self.rows or ROWS)
        self._known: dict[tuple[int, bool], TensorGroup] = {}
        self._layers: dict[int, tuple[int, ...]] = {}

    def of(self, tensor: int, expert_parallel: bool = False) -> TensorGroup:
        key = tensor, expert_parallel and tensor > 1
        if key not in self._known:
            with warnings.catch_warnings():
                if self._known:
                    warnings.simplefilter("ignore")  # the first has shown them
                config = dataclasses.replace(self._config, enable_expert_parallel=key[1])
                self._known[key] = TensorGroup.of(config, tensor, self._device)
        return self._known[key]

    def layers(self, stages: int) -> tuple[int, ...]:
        """Numbers of layers by stage.

        Raises:
            InvalidArgument: the model cannot be divided into so many stages.
        """
        if stages not in self._layers:
            model = self.of(1).spec.model
            check_divisible(model, stages)
            costs, head = layer_costs(model)
            self._layers[stages] = even_stages(costs, 0.0, head, stages)
        return self._layers[stages]


def _shares(point: Point) -> list[tuple[Cause, float]]:
    """The largest first."""
    total = sum(point.causes.values())
    return sorted(((cause, point.causes[cause] / total) for cause in CAUSES), key=lambda share: -share[1])
