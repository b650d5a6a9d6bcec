"""SmolLM3: Llama without rotary embedding in some layers, by default every fourth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jengine.base.errors import ModelError
from jengine.models.family import Family, Fields
from jengine.models.hf_config import windows_by_layer_types
from jengine.models.llama import Llama, read_llama


def read_smollm3(hf: Fields) -> dict[str, Any]:
    layers, interval = int(hf["num_hidden_layers"]), int(hf.get("no_rope_layer_interval") or 4)
    # true for layers that rotate
    rotated = hf.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    if len(rotated) < layers:
        raise ModelError(f"no_rope_layers has {len(rotated)} layers, num_hidden_layers is {layers}")
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    types = ["full_attention" if window is None or rotated[i] else "sliding_attention" for i in range(layers)]
    fields, unrotated = read_llama(hf), tuple(i for i in range(layers) if not rotated[i])
    return {
        **fields,
        **windows_by_layer_types(hf, window, types),
        "rope": replace(fields["rope"], unrotated=unrotated),
    }


DEFAULTS = {"max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}
FAMILIES = {"smollm3": Family("SmolLM3", Llama, read_smollm3, DEFAULTS)}
