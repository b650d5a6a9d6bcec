"""Lower bounds on a step's cost: operations, memory traffic, link traffic, and the time they take. Pure
arithmetic.

These are bounds, not predictions (Williams, Waterman and Patterson, "Roofline", 2009): all resources are
fully used at the same time, and the slowest one decides. Norms, activations, sampling, launches and link
latency are left out, because they are small or overlap.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from jengine.devices.device_spec import DeviceSpec
from jengine.models.by_layer import at, key_value_rows, kv_layer
from jengine.models.cache import cache_groups
from jengine.models.config import ModelConfig

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
class Work:
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


def attention_elements(config: ModelConfig, layer: int = 0) -> int:
    """Elements of a layer's matrices for queries, keys, values, gates and output."""
    latent, linear, hidden, heads = config.latent, config.linear, config.hidden_size, config.num_heads
    if linear is not None and layer in linear.layers:
        keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
        if not keys:  # a convolution between two gates
            return 4 * values * hidden + values * linear.taps
        products = (2 * keys + 3 * values) * hidden
        if linear.delta:  # rates and decays
            products += 2 * linear.value_heads * hidden + linear.value_heads
        return products + (2 * keys + values) * linear.taps
    if latent is None:
        own = at(config, layer)
        return (
            ((2 + config.attention_gate) * heads + key_value_rows(config, layer) * own.num_kv_heads)
            * own.head_dim
            * hidden
        )
    down, inputs = (
        (0, hidden) if latent.query_rank is None else (hidden * latent.query_rank, latent.query_rank)
    )
    expanded = heads * (latent.key_dim + latent.value_dim) * latent.rank
    return (
        down
        + heads * latent.query_dim * inputs
        + hidden * latent.cached_dim
        + expanded
        + heads * latent.value_dim * hidden
    )


def state_operations(config: ModelConfig) -> int:
    """Operations of a token's recurrences, over all layers: its key (in a delta rule), its update and its
    query each use every state element.
    """
    linear = config.linear
    each = 0 if linear is None else linear.value_heads * linear.key_dim * linear.value_dim
    return 0 if linear is None else len(linear.layers) * (6 if linear.delta else 4) * each


def attending_layers(config: ModelConfig) -> list[int]:
    """Indices of the layers that attend to earlier tokens."""
    recurrent = () if config.linear is None else config.linear.layers
    return [layer for layer in range(config.num_layers) if layer not in recurrent]


def mlp_elements(config: ModelConfig, layer: int, experts: float) -> float:
    """Elements of a layer's MLP, or of its router and this many experts."""
    matrices = 3 if config.gated_mlp else 2
    if layer not in config.expert_layers:
        return matrices * config.hidden_size * at(config, layer).intermediate_size
    shared = matrices * config.shared_expert_size + config.shared_expert_gate
    return config.hidden_size * (config.num_experts + matrices * experts * config.expert_size + shared)


def attended_channels(config: ModelConfig, layer: int) -> int:
    """Number of channels of each cached token, in keys and in values, that a token's queries in a layer
    use.
    """
    if config.latent is not None:
        return config.num_heads * (config.latent.cached_dim + config.latent.rank)
    return 2 * config.num_heads * at(config, layer).head_dim


def head_elements(config: ModelConfig) -> int:
    """Elements of the logits matrix, and of the projection before it if embeddings have a different size."""
    return _table_elements(config) + _projection_elements(config)


def _table_elements(config: ModelConfig) -> int:
    return config.vocab_size * (config.embedding_size or config.hidden_size)


def _projection_elements(config: ModelConfig) -> int:
    size = config.embedding_size or config.hidden_size
    return size * config.hidden_size if size != config.hidden_size else 0


def layers_elements(config: ModelConfig, experts: float) -> float:
    """Elements of all layers' matrices, with this many experts in layers that have any."""
    # parameters per layer of Gemma 3n and 4: per-layer embedding's gate and projections, the shortcut, stream
    # mixing
    more = 0
    if config.layer_inputs is not None:
        more += 3 * config.layer_inputs.size * config.hidden_size
    if config.altup is not None:
        streams = config.altup.streams
        more += (2 * config.altup.laurel_rank + streams) * config.hidden_size + streams**3 + streams**2
    layers = sum(
        attention_elements(config, layer) + mlp_elements(config, layer, experts)
        for layer in range(config.num_layers)
    )
    between = 0 if config.altup is None else 2 * (config.altup.streams - 1) * config.hidden_size**2
    return layers + config.num_layers * more + between


def matrix_elements(config: ModelConfig) -> float:
    """Elements of all matrices: a model's parameters without norms, biases and learned positions."""
    embedding = _projection_elements(config) + (0 if config.tie_embeddings else _table_elements(config))
    inputs = config.layer_inputs
    embedding += 0 if inputs is None else inputs.vocab_size * inputs.size * config.num_layers
    return layers_elements(config, config.num_experts) + head_elements(config) + embedding


def experts_met(config: ModelConfig, tokens: int) -> float:
    """Expected number of a layer's experts that this many tokens use, if each token chooses at random."""
    if not config.num_experts:
        return 0.0
    return config.num_experts * (1 - (1 - config.experts_per_token / config.num_experts) ** tokens)


def kv_token_bytes(config: ModelConfig, itemsize: float, devices: int = 1) -> float:
    """Bytes of a token's keys and values over all layers, on each device. Kv heads are repeated if there are
    fewer than devices."""
    groups = cache_groups(dataclasses.replace(config, shards=devices))
    return sum(group.token_bytes(itemsize, devices) for group in groups)


def seen(config: ModelConfig, context: float) -> dict[int, float]:
    """Number of cached tokens that a query attends to, by layer. Layers with a window have fewer."""
    return {layer: min(context, config.window(layer) or context) for layer in attending_layers(config)}


def mean_seen(config: ModelConfig, prompt: int) -> dict[int, float]:
    """The same, averaged over the tokens of a prompt."""
    return {layer: window - window**2 / (2 * prompt) for layer, window in seen(config, prompt).items()}


def _met(config: ModelConfig, attended: dict[int, float]) -> float:
    """Number of channels of cached tokens that a query uses, summed over all layers."""
    return sum(attended_channels(config, layer) * tokens for layer, tokens in attended.items())


def _read(config: ModelConfig, formats: Formats, attended: dict[int, float]) -> float:
    """Bytes of cached tokens that are read for a query. Each layer reads keys and values, shared ones too."""
    sizes = {layer: at(config, layer).num_kv_heads * at(config, layer).head_dim for layer in attended}
    kept = sum(size for layer, size in sizes.items() if kv_layer(config, layer) == layer)
    return formats.kv_bytes * sum(tokens * sizes[layer] for layer, tokens in attended.items()) / kept


def decode(config: ModelConfig, formats: Formats, batch: int, context: int) -> Work:
    """One token for each of `batch` sequences of `context` tokens."""
    layers = layers_elements(config, config.experts_per_token)
    met = layers_elements(config, experts_met(config, batch)) + head_elements(config)
    attended = seen(config, context)
    return Work(
        products=2 * batch * (layers + head_elements(config)) / formats.devices,
        attention=batch * (2 * _met(config, attended) + state_operations(config)) / formats.devices,
        read=met * formats.weight_bytes / formats.devices
        + batch * (_read(config, formats, attended) + 2 * formats.state_bytes),
        sent=_sent(config, formats, batch),
    )


def prefill(config: ModelConfig, formats: Formats, tokens: int, prompt: int) -> Work:
    """An average step with `tokens` tokens of prompts of `prompt` tokens each: part of one prompt, or several
    prompts.

    The cached tokens of a prompt are read once for all of its tokens in the step. Each prompt needs one row
    of logits.
    """
    layers = layers_elements(config, config.experts_per_token)
    met = layers_elements(config, experts_met(config, tokens)) + head_elements(config)
    attended = mean_seen(config, prompt)
    return Work(
        products=2 * (tokens * layers + tokens / prompt * head_elements(config)) / formats.devices,
        attention=tokens * (2 * _met(config, attended) + state_operations(config)) / formats.devices,
        read=met * formats.weight_bytes / formats.devices
        + max(1.0, tokens / prompt) * (_read(config, formats, attended) + 2 * formats.state_bytes),
        sent=_sent(config, formats, tokens),
    )


def _sent(config: ModelConfig, formats: Formats, tokens: int) -> float:
    """Bytes sent by a step's all-reduces. In a ring, each device sends its share to every other one, and then
    the sum.
    """
    size = tokens * config.hidden_size * formats.activation_bytes
    return ALL_REDUCES * config.num_layers * 2 * size * (formats.devices - 1) / formats.devices


def bound(work: Work, formats: Formats, device: DeviceSpec) -> Bound:
    """Minimum time on a device."""
    rate = device.rates[formats.dtype]
    seconds: dict[Resource, float] = {
        "memory": work.read / device.bandwidth,
        "products": work.products / device.rates.get(formats.product, rate) + work.attention / rate,
        "links": work.sent / device.link,
    }
    slowest = max(seconds, key=lambda name: seconds[name])
    return Bound(seconds[slowest], slowest)
