"""What an engine's step costs on devices that need not be present: a roofline for each part of a layer, at
the shares of the data sheet's rates that steps reach (Williams, Waterman and Patterson, "Roofline", 2009).

Parts of a layer run one after the other. Each takes the longer of its bytes and its operations; collectives
come in between and are not overlapped. Norms, activations and launches have no parts of their own: the
shares, which were measured over whole steps, include them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import comb, sqrt
from typing import Literal, NamedTuple

import jax
import numpy as np

from jengine.capacity.planning.links import Cluster, Seconds
from jengine.models import Model
from jengine.parallel.layout import Layout

MANY = 512  # tokens from which the excess over the mean grows with their square root
Cause = Literal["memory", "products", "links", "network", "latency", "bubble"]
NAMES: dict[Cause, str] = {
    "memory": "memory bandwidth",
    "products": "matrix rate",
    "links": "links in a host",
    "network": "links between hosts",
    "latency": "starting collectives",
    "bubble": "waiting for other stages",
}
CAUSES: tuple[Cause, ...] = tuple(NAMES)
LOGIT_BYTES = 4  # float32
Causes = dict[Cause, float]


@functools.lru_cache(maxsize=1 << 14)
def most_met(experts: int, chosen: int, devices: int, tokens: int) -> float:
    """Expected number of different experts that the tokens use on the device with the most of them."""
    if not tokens:
        return 0.0
    met = 1 - (1 - chosen / experts) ** tokens
    local = -(-experts // devices)
    each = [comb(local, count) * met**count * (1 - met) ** (local - count) for count in range(local)]
    return _expected_most(np.cumsum(each), devices)


@functools.lru_cache(maxsize=1 << 14)
def most_routed(experts: int, chosen: int, devices: int, tokens: int) -> float:
    """Expected number of (token, expert) pairs on the device with the most of them."""
    mean = tokens * chosen / devices
    if tokens > MANY:
        excess = most_routed(experts, chosen, devices, MANY) - MANY * chosen / devices
        return mean + excess * sqrt(tokens / MANY)
    if not tokens or devices == 1:
        return mean
    local = -(-experts // devices)
    chances = [  # probabilities that a token chooses 0, 1, ... experts of a device
        comb(local, count) * comb(experts - local, chosen - count) / comb(experts, chosen)
        for count in range(min(chosen, local) + 1)
    ]
    size = tokens * (len(chances) - 1) + 1
    all_of = np.fft.irfft(np.fft.rfft(chances, 2 * size) ** tokens, 2 * size)[:size]  # of independent tokens
    return _expected_most(np.minimum(np.cumsum(np.maximum(all_of, 0.0)), 1.0)[:-1], devices)


def most_arrived(mean: float, cohorts: int) -> float:
    """Expected number of arrivals at the cohort with the most of them, if `mean` arrive at all together."""
    if cohorts == 1:
        return mean
    each = mean / cohorts
    counts = np.arange(1, int(each + 10 * sqrt(each)) + 12)
    steps = np.exp(-each + np.cumsum(np.log(each) - np.log(counts)))  # probabilities of 1, 2, ...
    return _expected_most(np.cumsum([np.exp(-each), *steps]), cohorts)


def _expected_most(below: np.ndarray, devices: int) -> float:
    """The expected maximum of so many equal variables. below: probabilities that one is at most 0, 1, ..."""
    return float(np.sum(1 - below**devices))


@dataclass(frozen=True, slots=True)
class Formats:
    """Number formats of a model at run time.

    Attributes:
        weight_bytes: bytes of an element of a weight matrix.
        product: dtype in which weights are multiplied.
        dtype: of activations and of attention's products.
        kv_bytes: bytes of a token in the cache, on each device, over all layers.
        state_bytes: bytes of a sequence's recurrent states, on each device, over all layers.
    """

    weight_bytes: float
    product: str
    dtype: str
    activation_bytes: int
    kv_bytes: float
    state_bytes: float = 0.0


def experts_met(model: Model, tokens: int) -> float:
    """Expected number of a layer's experts that this many tokens use, if each token chooses at random."""
    experts, each = model.elements.experts, model.elements.experts_per_token
    return experts * (1 - (1 - each / experts) ** tokens) if experts else 0.0


def kv_token_bytes(model: Model, itemsize: float) -> float:
    """Bytes of a token's keys and values over all layers, on each device of the model's layout."""
    return sum(group.token_bytes(itemsize, model.config.shards) for group in model.groups)


def seen(model: Model, context: float) -> dict[int, float]:
    """Number of cached tokens that a query attends to, by layer. Layers with a window have fewer."""
    attending = {layer: entry for layer, entry in enumerate(model.entries) if entry.kind != "state"}
    return {layer: min(context, entry.window or context) for layer, entry in attending.items()}


def mean_seen(model: Model, prompt: int) -> dict[int, float]:
    """`seen`, averaged over the tokens of a prompt."""
    return {layer: window - window**2 / (2 * prompt) for layer, window in seen(model, prompt).items()}


def cached_bytes(model: Model, formats: Formats, attended: dict[int, float]) -> float:
    """Bytes of cached tokens that are read for a query. Each layer reads keys and values, shared ones too."""
    sizes = {layer: sum(array.elements for array in model.entries[layer].arrays) for layer in attended}
    stored = sum(size for layer, size in sizes.items() if model.entries[layer].reads in (None, layer))
    return formats.kv_bytes * sum(tokens * sizes[layer] for layer, tokens in attended.items()) / stored


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


@dataclass(frozen=True)
class Roofline:
    """What the steps of a layout cost.

    Attributes:
        model, formats: for `layout.tensor` devices.
        layers: of each stage; None: there is one stage, which has all.
        attending: by context, what was computed before.
    """

    model: Model
    formats: Formats
    cluster: Cluster
    layout: Layout = field(default_factory=Layout)
    layers: tuple[int, ...] | None = None
    attending: dict[tuple[float, bool], tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @functools.cached_property
    def expert_layers(self) -> int:
        """Number of layers that have experts."""
        layers = self.model.axes["layers"]
        every = layers.values() if isinstance(layers, dict) else layers

        def routed(layer: object) -> bool:
            leaves = jax.tree.leaves(layer, is_leaf=lambda axes: isinstance(axes, tuple))
            return any(axes and axes[0] == "experts" for axes in leaves)

        return sum(map(routed, every))

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

    def _stages(self, cohort: Batch) -> list[Causes]:
        every = self.layers or (self.model.config.num_layers,)
        last = len(every) - 1
        kinds = [(layers, stage == 0, stage == last) for stage, layers in enumerate(every)]
        costs = {kind: self._stage(cohort, *kind) for kind in dict.fromkeys(kinds)}
        return [costs[kind] for kind in kinds]

    def _stage(self, cohort: Batch, layers: int, begins: bool, ends: bool) -> Causes:
        """Seconds of a stage of so many layers with one cohort.

        Args:
            begins, ends: whether it has the embedding, and the output head.
        """
        layout, device, formats = self.layout, self.cluster.device, self.formats
        rate = device.rates[formats.dtype]
        share = layers / self.model.config.num_layers
        rows, tokens = -(-cohort.rows // layout.data), -(-cohort.tokens // layout.data)
        local = Batch(rows, cohort.context, tokens, cohort.prompt)
        causes: Causes = dict.fromkeys(CAUSES, 0.0)
        for moved, operations, attending in self.parts(local, share, float(ends)):
            of_products = rate if attending else device.rates.get(formats.product, rate)
            reading = moved / (device.bandwidth * device.bandwidth_share)
            computing = operations / (of_products * device.products_share)
            cause: Cause = "memory" if reading > computing else "products"
            causes[cause] += max(reading, computing)
        size = (rows + tokens) * self.model.config.hidden_size * formats.activation_bytes
        sent = self._collectives(size, layers, share * self.expert_layers)
        logits = _logits(local) * self.model.config.vocab_size * LOGIT_BYTES
        tensor = self.cluster.tensor_group(layout)
        if ends:  # the sampler's exchange of logits, each device's columns for all columns of its rows
            sent = sent.plus(self.cluster.gather(logits / layout.tensor, tensor))
        else:
            sent = sent.plus(self._to_the_next_stage(size))
        if begins:  # the embedding
            sent = sent.plus(self.cluster.all_reduce(size, tensor))
        causes["links"], causes["network"], causes["latency"] = sent
        return causes

    def parts(
        self, batch: Batch, share: float = 1.0, head: float = 1.0
    ) -> Iterator[tuple[float, float, bool]]:
        """The work of one device: (bytes, operations, whether these are attention's) of matrices for each
        token,
        experts, cached tokens, and the output head.

        Args:
            batch: of one data rank.
            share: of the layers that the device's stage has.
            head: 1 if the stage has the output head, otherwise 0.
        """
        elements, formats, tensor = self.model.elements, self.formats, self.layout.tensor
        tokens = batch.rows + batch.tokens
        yield (
            share * elements.layers * formats.weight_bytes / tensor,
            2 * tokens * share * elements.layers / tensor,
            False,
        )
        if elements.experts:
            met, routed = self._experts(math.ceil(tokens))
            size = share * elements.expert
            yield met * size * formats.weight_bytes, 2 * routed * size, False
        read, attention = self._cached(batch)
        yield share * read, share * attention, True
        yield (
            head * elements.head * formats.weight_bytes / tensor,
            2 * head * _logits(batch) * elements.head / tensor,
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

    def _cached(self, batch: Batch) -> tuple[float, float]:
        """Bytes of the cache, and operations on cached tokens and states, on one device, over all layers."""
        read, operations = (batch.rows * part for part in self._attending(batch.context))
        if batch.tokens:
            of_prompt, of_token = self._attending(batch.prompt, mean=True)
            read += max(1.0, batch.tokens / batch.prompt) * of_prompt  # once for all its tokens in the step
            operations += batch.tokens * of_token
        return read, operations / self.layout.tensor

    def _attending(self, context: float, *, mean: bool = False) -> tuple[float, float]:
        """Bytes on one device that a token reads which attends to `context` tokens, and operations on them on
        all devices together, over all layers; with `mean`, on average over the tokens of a prompt of this
        length.
        """
        known = self.attending.get((context, mean))
        if known is None:
            model = self.model
            attended = mean_seen(model, math.ceil(context)) if mean else seen(model, context)
            read = cached_bytes(model, self.formats, attended) if attended else 0.0
            operations = sum(entry.operations * attended.get(i, 1) for i, entry in enumerate(model.entries))
            known = read + 2 * self.formats.state_bytes, operations
            self.attending[context, mean] = known
        return known

    def _collectives(self, size: float, layers: int, with_experts: float) -> Seconds:
        """Time of the collectives of so many layers, for `size` bytes of tokens on each data rank: one sum
        after attention and one after the MLP; where data ranks share experts, tokens of all ranks are
        gathered, and the results are summed over them.
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


def _logits(batch: Batch) -> float:
    """Rows of logits: of every sequence, and of every prompt's end."""
    return batch.rows + batch.tokens / batch.prompt
