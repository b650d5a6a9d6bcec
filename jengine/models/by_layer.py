"""Layers of Gemma 3n and 4: sizes, embeddings of their own, and whose keys and values each of them reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jengine.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """Heads of layers without a window, if they differ from those of layers with one.

    Attributes:
        keys_as_values: keys and values come from one matrix; their norms differ.
    """

    head_dim: int
    kv_heads: int
    keys_as_values: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeysValues:
    """The last layers read the keys and values of the last layer before them with the same window.

    Attributes:
        layers: their number.
        wide_mlp: their MLPs are twice as wide.
    """

    layers: int
    wide_mlp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """An embedding of each token for each layer, which the layer adds to the residual stream through a gate.

    Attributes:
        size: channels per layer.
        vocab_size: rows of the embedding table, which holds the channels of all layers.
    """

    size: int
    vocab_size: int


def at(config: ModelConfig, layer: int) -> ModelConfig:
    """The configuration with the sizes of one layer."""
    changes: dict[str, Any] = {}
    full, shared = config.find(FullAttention), config.find(SharedKeysValues)
    if full is not None and config.window(layer) is None:
        changes |= {"head_dim": full.head_dim, "num_kv_heads": full.kv_heads}
    if shared is not None and shared.wide_mlp and kv_layer(config, layer) != layer:
        changes |= {"intermediate_size": 2 * config.intermediate_size}
    return dataclasses.replace(config, **changes) if changes else config


def kv_layer(config: ModelConfig, layer: int) -> int:
    """Index of the layer whose keys and values a layer reads: its own, except in those of SharedKeysValues.

    Raises:
        ValueError: no layer before these has the layer's window.
    """
    shared = config.find(SharedKeysValues)
    first = config.num_layers - (0 if shared is None else shared.layers)
    return (
        layer if layer < first else max(i for i in range(first) if config.window(i) == config.window(layer))
    )


def key_value_rows(config: ModelConfig, layer: int) -> int:
    """Number of matrices that a layer has for keys and values: 2, 1 or 0."""
    if kv_layer(config, layer) != layer:
        return 0
    full = config.find(FullAttention)
    return 1 if full is not None and full.keys_as_values and config.window(layer) is None else 2
