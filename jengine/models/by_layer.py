"""Sizes of single layers, and the layer whose keys and values each layer reads."""

from __future__ import annotations

import dataclasses
from typing import Any

from jengine.models.config import ModelConfig


def at(config: ModelConfig, layer: int) -> ModelConfig:
    """The configuration with the sizes of one layer."""
    changes: dict[str, Any] = {}
    if config.full_attention is not None and config.window(layer) is None:
        changes |= {
            "head_dim": config.full_attention.head_dim,
            "num_kv_heads": config.full_attention.kv_heads,
        }
    if config.double_wide_mlp and kv_layer(config, layer) != layer:
        changes |= {"intermediate_size": 2 * config.intermediate_size}
    return dataclasses.replace(config, **changes) if changes else config


def kv_layer(config: ModelConfig, layer: int) -> int:
    """Index of the layer whose keys and values a layer reads: its own, except in the last shared_kv_layers.

    Raises:
        ValueError: no layer before these has the layer's window.
    """
    first = config.num_layers - config.shared_kv_layers
    return (
        layer if layer < first else max(i for i in range(first) if config.window(i) == config.window(layer))
    )


def key_value_rows(config: ModelConfig, layer: int) -> int:
    """Number of matrices that a layer has for keys and values: 2, 1 or 0."""
    if kv_layer(config, layer) != layer:
        return 0
    full = config.full_attention
    return 1 if full is not None and full.keys_as_values and config.window(layer) is None else 2
