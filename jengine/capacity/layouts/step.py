"""Seconds of an engine's step with a layout, by what they wait for: a roofline for each part of a layer.

Parts of a layer run one after the other. Each takes the longer of its bytes and its operations at the data
sheet's rates; collectives come in between and are not overlapped. So this is a lower bound, but a closer one
than `planning.roofline`, where all parts overlap. Norms, activations and launches are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax

from jengine.capacity.layouts.links import Cluster, Seconds
from jengine.capacity.layouts.routing import most_met, most_routed
from jengine.capacity.planning.roofline import (
    Formats,
    cached_bytes,
    cached_operations,
    experts_met,
    mean_seen,
    seen,
)
from jengine.models import Model
from jengine.parallel.layout import Layout

Cause = Literal["memory", "products", "links", "network", "latency", "bubble"]
CAUSES: tuple[Cause, ...] = ("memory", "products", "links", "network", "latency", "bubble")
LOGIT_BYTES = 4  # float32
Causes = dict[Cause, float]


class Batch(NamedTuple):
    """What an engine computes in a step, on all of its devices together.

    Attributes:
        rows: decoding sequences.
        context: cached tokens of each.
        tokens: of prompts.
        prompt: tokens of each of these prompts; the mean token attends to half of them.
    """

    rows: float
    context: float = 0.0
    tokens: float = 0.0
    prompt: float = 1.0


class _Attending(NamedTuple):
    """Bytes that are read, and operations on them, for one token over all layers: bytes on one device,
    operations on all devices together.
    """

    read: float
    operations: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCosts:
    """What a layout's steps cost.

    Attributes:
        model, formats: for `layout.tensor` devices.
        layers: of each stage.
        expert_layers: layers that have experts.
        attending: by context, what was computed before.
    """

    model: Model
    formats: Formats
    layout: Layout
    cluster: Cluster
    layers: tuple[int, ...]
    expert_layers: int
    attending: dict[tuple[float, bool], _Attending] = field(default_factory=dict, repr=False, compare=False)

    def step(self, batch: Batch) -> Causes:
        """Seconds in which each sequence gets one token: its cohort passes through all stages.

        With stages, as many cohorts of sequences follow each other, and the slowest stage sets their pace;
        the others wait (bubble).
        """
        stages = self.layout.stages
        every = self._stages(Batch(batch.rows / stages, batch.context, batch.tokens / stages, batch.prompt))
        slowest = max(sum(stage.values()) for stage in every)
        causes: Causes = {cause: sum(stage[cause] for stage in every) for cause in CAUSES}
        causes["bubble"] = max(0.0, stages * slowest - sum(causes.values()))
        return causes

    def seconds(self, batch: Batch) -> float:
        """The sum of `step`."""
        return sum(self.step(batch).values())

    def stage_seconds(self, cohort: Batch) -> float:
        """Seconds of the slowest stage with one cohort."""
        return max(sum(stage.values()) for stage in self._stages(cohort))

    def _stages(self, cohort: Batch) -> list[Causes]:
        last = len(self.layers) - 1
        kinds = [(own, stage == 0, stage == last) for stage, own in enumerate(self.layers)]
        costs = {kind: self._stage(cohort, *kind) for kind in dict.fromkeys(kinds)}
        return [costs[kind] for kind in kinds]

    def _stage(self, cohort: Batch, layers: int, begins: bool, ends: bool) -> Causes:
        """Seconds of a stage of so many layers with one cohort.

        Args:
            begins, ends: whether it has the embedding, and the output head.
        """
        layout, hidden = self.layout, self.model.config.hidden_size
        share = layers / self.model.config.num_layers
        rows, tokens = -(-cohort.rows // layout.data), -(-cohort.tokens // layout.data)
        own = Batch(rows, cohort.context, tokens, cohort.prompt)
        causes: Causes = dict.fromkeys(CAUSES, 0.0)
        for moved, operations, attending in self._parts(own, share, float(ends)):
            rate = self._rate(attending)
            cause: Cause = (
                "memory" if moved / self.cluster.device.bandwidth > operations / rate else "products"
            )
            causes[cause] += max(moved / self.cluster.device.bandwidth, operations / rate)
        size = (rows + tokens) * hidden * self.formats.activation_bytes
        sent = self._collectives(size, layers, share * self.expert_layers)
        logits = _logits(own) * self.model.config.vocab_size * LOGIT_BYTES
        tensor = self.cluster.tensor_group(layout)
        if ends:  # the sampler's exchange of logits, each device's columns for all columns of its rows
            sent = sent.plus(self.cluster.gather(logits / layout.tensor, tensor))
        else:
            sent = sent.plus(self._to_the_next_stage(size))
        if begins:  # the embedding
            sent = sent.plus(self.cluster.all_reduce(size, tensor))
        causes["links"], causes["network"], causes["latency"] = sent
        return causes

    def _rate(self, attending: bool) -> float:
        rates, formats = self.cluster.device.rates, self.formats
        own = rates[formats.dtype]
        return own if attending else rates.get(formats.product, own)

    def _parts(self, own: Batch, share: float, head: float) -> Iterator[tuple[float, float, bool]]:
        """Of one device with its share of the layers: (bytes, operations, whether these are attention's) of
        matrices for each token, experts, cached tokens, and the output head.

        own: the part of one data rank.
        """
        elements, formats, tensor = self.model.elements, self.formats, self.layout.tensor
        tokens = own.rows + own.tokens
        yield (
            share * elements.layers * formats.weight_bytes / tensor,
            2 * tokens * share * elements.layers / tensor,
            False,
        )
        if elements.experts:
            met, routed = self._experts(math.ceil(tokens))
            size = share * elements.expert
            yield met * size * formats.weight_bytes, 2 * routed * size, False
        yield share * self._read(own), share * self._attention(own), True
        yield (
            head * elements.head * formats.weight_bytes / tensor,
            2 * head * _logits(own) * elements.head / tensor,
            False,
        )

    def _experts(self, tokens: int) -> tuple[float, float]:
        """Experts that the busiest device reads in each layer, and (token, expert) pairs that it computes, if
        each data rank has so many tokens.
        """
        elements, layout = self.model.elements, self.layout
        experts, chosen = elements.experts, elements.experts_per_token
        if not layout.expert_parallel:  # a part of each
            return experts_met(self.model, tokens) / layout.tensor, tokens * chosen / layout.tensor
        every = tokens * layout.data
        return (
            most_met(experts, chosen, layout.stage_devices, every),
            most_routed(experts, chosen, layout.stage_devices, every),
        )

    def _read(self, own: Batch) -> float:
        """Bytes of the cache on one device, over all layers."""
        read = own.rows * self._attending(own.context).read
        if own.tokens:  # once for all tokens of a prompt in the step
            read += max(1.0, own.tokens / own.prompt) * self._attending(own.prompt, mean=True).read
        return read

    def _attention(self, own: Batch) -> float:
        """Operations on cached tokens and states, on one device, over all layers."""
        operations = own.rows * self._attending(own.context).operations
        if own.tokens:
            operations += own.tokens * self._attending(own.prompt, mean=True).operations
        return operations / self.layout.tensor

    def _attending(self, context: float, *, mean: bool = False) -> _Attending:
        """What a token costs that attends to so many, or, with `mean`, that is one of so many of a prompt."""
        known = self.attending.get((context, mean))
        if known is None:
            model = self.model
            attended = mean_seen(model, math.ceil(context)) if mean else seen(model, context)
            read = cached_bytes(model, self.formats, attended) if attended else 0.0
            known = _Attending(read + 2 * self.formats.state_bytes, cached_operations(model, attended))
            self.attending[context, mean] = known
        return known

    def _collectives(self, size: float, layers: int, with_experts: float) -> Seconds:
        """Of so many layers, for `size` bytes of tokens on each data rank: one sum after attention and one
        after the MLP; where data ranks share experts, tokens of all ranks are gathered, and the results are
        summed over them.
        """
        cluster, layout = self.cluster, self.layout
        tensor, data = cluster.tensor_group(layout), cluster.data_group(layout)
        sums = cluster.all_reduce(size, tensor) * (2 * layers)
        if layout.data == 1:
            return sums
        exchange = cluster.gather(size * layout.data, data) * 2
        return sums.plus(exchange * with_experts)

    def _to_the_next_stage(self, size: float) -> Seconds:
        """On average over the borders, of which some lie between hosts."""
        borders, between = self.layout.stages - 1, self.cluster.borders(self.layout)
        inside = self.cluster.send(size, between_hosts=False) * ((borders - between) / borders)
        if not between:
            return inside
        return inside.plus(self.cluster.send(size, between_hosts=True) * (between / borders))


def expert_layers(model: Model) -> int:
    """Number of layers that have experts."""
    layers = model.axes["layers"]
    every = layers.values() if isinstance(layers, dict) else layers

    def routed(layer: object) -> bool:
        leaves = jax.tree.leaves(layer, is_leaf=lambda axes: isinstance(axes, tuple))
        return any(axes and axes[0] == "experts" for axes in leaves)

    return sum(map(routed, every))


def _logits(batch: Batch) -> float:
    """Rows of logits: of every sequence, and of every prompt's end."""
    return batch.rows + batch.tokens / batch.prompt
