"""Compares the layouts of a model on given devices, and says why one is best and why others lose."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jengine.base.errors import InvalidArgument, JengineError
from jengine.capacity.layouts.deployment import EXPERTS, Deployment, deployments, refused
from jengine.capacity.layouts.links import Cluster
from jengine.capacity.layouts.memory import LayoutMemory, TensorGroup, memory_of
from jengine.capacity.layouts.serving import Point, Serving, Traffic
from jengine.capacity.layouts.step import CAUSES, Cause, LayoutCosts, expert_layers
from jengine.core.config import EngineConfig
from jengine.devices.device_spec import DeviceSpec
from jengine.execution.spec import ExecutionSpec
from jengine.models.stages import check_divisible, even_stages, layer_costs
from jengine.parallel.layout import OPTIONS, Layout

# the most sequences in a step, and the fewest that each data rank may have, unless max_num_seqs is given
ROWS, FEWEST_ROWS = 1024, 256
ALIKE = 0.99  # of the best throughput: from here on, the engine with fewer devices is the better one
NAMES: dict[Cause, str] = {
    "memory": "memory bandwidth",
    "products": "matrix rate",
    "links": "links in a host",
    "network": "links between hosts",
    "latency": "starting collectives",
    "bubble": "waiting for other stages",
}


@dataclass(frozen=True)
class Candidate:
    """A deployment that the devices can have.

    Attributes:
        spec: of one tensor group, as if it were an engine alone.
        copies: of each cached token, on the devices of a tensor group.
    """

    deployment: Deployment
    memory: LayoutMemory
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
        return self.best.causes[cause] * self.serving.costs.layout.devices / self.best.sequences


@dataclass(frozen=True)
class Choice:
    """The layouts of a model on a cluster.

    Attributes:
        group: the model on one device, whether it fits or not.
        candidates: that fit, the best first.
        refused: others, each with the reason.
    """

    model: str
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
        point, others = best.best, [one for one in self.candidates[1:] if one.best]
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
                return f"the cache has no room for a sequence of {traffic.tokens:,} tokens: {other.memory}"
            alone = other.serving.alone
            return (
                f"misses the targets even with one sequence: first token {1e3 * alone.ttft:,.0f} ms, then"
                f" {1e3 * alone.tpot:.1f} ms per token"
            )
        assert self.best is not None
        more = {cause: other.costs(cause) - self.best.costs(cause) for cause in CAUSES}
        own: list[Cause] = ["memory", "products"]  # one of them hides the other, so they count together
        computing = max(own, key=lambda one: more[one])
        waiting = max((one for one in CAUSES if one not in own), key=lambda one: more[one])
        cause = computing if sum(more[one] for one in own) > more[waiting] else waiting
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


def choose(
    config: EngineConfig, name: str, cluster: Cluster, traffic: Traffic, *, only: Layout | None = None
) -> Choice:
    """Compares all layouts of a model on a cluster.

    Args:
        config: options of the engine; its layout does not count.
        name: of the model.
        only: this layout alone, with as many replicas as there are devices for.

    Raises:
        InvalidArgument: the model or device does not support an option, or no sequence may be as long as the
            traffic's.
        ModelError: the model cannot be read, or is not supported.
    """
    groups = _Groups(dataclasses.replace(config, **_defaults()), cluster.device)
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
                if candidate.memory.free >= 0:
                    candidates.append(candidate)
                    continue
                why = f"does not fit: {candidate.memory}"
        without.append((deployment, why))
    return Choice(name, cluster, traffic, whole, _ranked(candidates), without)


def _defaults() -> dict[str, Any]:
    """Of the options that set a layout."""
    fields = EngineConfig.__dataclass_fields__
    return {name: fields[name].default for name in (*OPTIONS.values(), EXPERTS) if name in fields}


def _only(layout: Layout, cluster: Cluster) -> list[Deployment]:
    replicas, rest = divmod(cluster.count, layout.devices)
    if rest or not replicas:
        limit = f"must be a multiple of {layout.devices}, the devices of one engine"
        raise InvalidArgument("devices", cluster.count, limit)
    return [Deployment(layout, replicas)]


def _candidate(groups: _Groups, deployment: Deployment, cluster: Cluster, traffic: Traffic) -> Candidate:
    layout = deployment.layout
    group = groups.of(layout.tensor)
    stage = groups.of(layout.stage_devices) if layout.expert_parallel else group
    spec, layers = group.spec, groups.layers(layout.stages)
    rows = groups.rows or max(ROWS // layout.data, FEWEST_ROWS)
    memory = memory_of(group, layout, layers, stage, rows)
    costs = LayoutCosts(
        model=spec.model,
        formats=group.formats,
        layout=layout,
        cluster=cluster,
        layers=layers,
        expert_layers=expert_layers(spec.model),
    )
    most = rows * layout.data * layout.stages
    fits = min(most, memory.sequences(spec.most_pages(traffic.tokens)))
    budget = spec.table.max_tiles * spec.table.tile_size
    copies = layout.tensor * group.formats.kv_bytes / groups.of(1).formats.kv_bytes
    return Candidate(deployment, memory, Serving(costs, traffic, fits, budget), spec, copies)


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """The best first; of those that are nearly as fast as the fastest, the one with the fewest devices in an
    engine, since its devices wait for the fewest others.
    """
    ranked = sorted(candidates, key=lambda one: -one.throughput)
    if not ranked or not ranked[0].throughput:
        return ranked
    alike = [one for one in ranked if one.throughput >= ALIKE * ranked[0].throughput]
    first = min(alike, key=lambda one: one.deployment.layout.devices)
    return [first, *(one for one in ranked if one is not first)]


class _Groups:
    """Tensor groups by their number of devices; each is described once.

    Attributes:
        rows: max_num_seqs, if it is given.
    """

    def __init__(self, config: EngineConfig, device: DeviceSpec) -> None:
        self.rows, self._device = config.max_num_seqs, device
        self._config = dataclasses.replace(config, max_num_seqs=self.rows or ROWS)
        self._known: dict[int, TensorGroup] = {}
        self._layers: dict[int, tuple[int, ...]] = {}

    def of(self, tensor: int) -> TensorGroup:
        if tensor not in self._known:
            with warnings.catch_warnings():
                if self._known:
                    warnings.simplefilter("ignore")  # the first has shown them
                self._known[tensor] = TensorGroup.of(self._config, tensor, self._device)
        return self._known[tensor]

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
    return sorted(((cause, point.causes[cause] / total) for cause in CAUSES), key=lambda one: -one[1])
