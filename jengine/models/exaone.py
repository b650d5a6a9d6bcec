"""EXAONE 4: norms on the results of attention and MLP, and per head on queries and keys.

If some layers have a sliding window, the others do not rotate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jengine.models.family import Family, Fields
from jengine.models.hf_config import decoder, full_attention_every, windows_by_layer_types
from jengine.models.olmo import Olmo
from jengine.models.qwen3 import Qwen3Attention


class Exaone4(Olmo):
    attention = Qwen3Attention


def read_exaone4(hf: Fields) -> dict[str, Any]:
    fields, window, pattern = decoder(hf), hf.get("sliding_window"), hf.get("sliding_window_pattern") or 4
    # LLLG means every fourth layer
    layers, every = fields["num_layers"], len(pattern) if isinstance(pattern, str) else int(pattern)
    if window is None:
        return fields
    windows = windows_by_layer_types(hf, window, full_attention_every(layers, every))
    seen = windows.get("windows", (None,) * layers)
    unrotated = tuple(i for i in range(layers) if seen[i] is None)
    return {**fields, **windows, "rope": replace(fields["rope"], unrotated=unrotated)}


FAMILIES = {
    "exaone4": Family("EXAONE 4", Exaone4, read_exaone4, {"rms_norm_eps": 1e-5, "sliding_window": 4096})
}
