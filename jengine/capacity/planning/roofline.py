"""Lower bounds on a step's cost: operations, memory traffic, link traffic, and the time they take. Pure
arithmetic.

These are bounds, not predictions (Williams, Waterman and Patterson, "Roofline", 2009): all resources are
fully used at the same time, and the slowest one decides. Norms, activations, sampling, launches and link
latency are left out, because they are small or overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jengine.devices.device_spec import DeviceSpec
from jengine.models import Model

Resource = Literal["memory", "products", "links"]
ALL_REDUCES = 2  # per layer: after attention, and after the MLP


@dataclass(frozen=True, slots=True)
class Formats:
    """Number formats of a model at run time, and the number of devices that share it.

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
    devices: int = 1
    state_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a step, on each device.

    Attributes:
        products: operations on weights, two for each element and token.
        attention: operations on keys and values, and on recurrent states.
        read: bytes of weights, keys and values. States are read and written, so they count twice.
        sent: bytes sent to other devices.
    """

    products: float
    attention: float
    read: float
    sent: float


@dataclass(frozen=True, slots=True)
class Bound:
    """The minimum time of a step, and the resource that determines it."""

    seconds: float
    resource: Resource


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
    """The same, averaged over the tokens of a prompt."""
    return {layer: window - window**2 / (2 * prompt) for layer, window in seen(model, prompt).items()}


def cached_operations(model: Model, attended: dict[int, float]) -> float:
    """Operations of a token on what is cached, over all layers."""
    return sum(entry.operations * attended.get(layer, 1) for layer, entry in enumerate(model.entries))


def cached_bytes(model: Model, formats: Formats, attended: dict[int, float]) -> float:
    """Bytes of cached tokens that are read for a query. Each layer reads keys and values, shared ones too."""
    sizes = {layer: sum(array.elements for array in model.entries[layer].arrays) for layer in attended}
    kept = sum(size for layer, size in sizes.items() if model.entries[layer].reads in (None, layer))
    return formats.kv_bytes * sum(tokens * sizes[layer] for layer, tokens in attended.items()) / kept


def decode(model: Model, formats: Formats, batch: int, context: int) -> StepWork:
    """One token for each of `batch` sequences of `context` tokens."""
    elements, attended = model.elements, seen(model, context)
    layers, met = (
        elements.used(elements.experts_per_token),
        elements.used(experts_met(model, batch)) + elements.head,
    )
    return StepWork(
        products=2 * batch * (layers + elements.head) / formats.devices,
        attention=batch * cached_operations(model, attended) / formats.devices,
        read=met * formats.weight_bytes / formats.devices
        + batch * (cached_bytes(model, formats, attended) + 2 * formats.state_bytes),
        sent=_sent(model, formats, batch),
    )


def prefill(model: Model, formats: Formats, tokens: int, prompt: int) -> StepWork:
    """An average step with `tokens` tokens of prompts of `prompt` tokens each: part of one prompt, or several
    prompts.

    The cached tokens of a prompt are read once for all of its tokens in the step. Each prompt needs one row
    of logits.
    """
    elements, attended = model.elements, mean_seen(model, prompt)
    layers, met = (
        elements.used(elements.experts_per_token),
        elements.used(experts_met(model, tokens)) + elements.head,
    )
    return StepWork(
        products=2 * (tokens * layers + tokens / prompt * elements.head) / formats.devices,
        attention=tokens * cached_operations(model, attended) / formats.devices,
        read=met * formats.weight_bytes / formats.devices
        + max(1.0, tokens / prompt) * (cached_bytes(model, formats, attended) + 2 * formats.state_bytes),
        sent=_sent(model, formats, tokens),
    )


def _sent(model: Model, formats: Formats, tokens: int) -> float:
    """Bytes sent by a step's all-reduces. In a ring, each device sends its share to every other one, and then
    the sum.
    """
    size = tokens * model.config.hidden_size * formats.activation_bytes
    return ALL_REDUCES * model.config.num_layers * 2 * size * (formats.devices - 1) / formats.devices


def bound(work: StepWork, formats: Formats, device: DeviceSpec) -> Bound:
    """Minimum time on a device."""
    rate = device.rates[formats.dtype]
    seconds: dict[Resource, float] = {
        "memory": work.read / device.bandwidth,
        "products": work.products / device.rates.get(formats.product, rate) + work.attention / rate,
        "links": work.sent / device.link,
    }
    slowest = max(seconds, key=lambda name: seconds[name])
    return Bound(seconds[slowest], slowest)
