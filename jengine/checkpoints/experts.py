"""Checkpoints that store all experts of a layer in one tensor: Qwen3.5's own, and some that training code
writes.
"""

from __future__ import annotations

from collections.abc import Collection

from jengine.checkpoints.stored import StoredTensor, Tensor, dense

# [experts, out, in] each
STACKED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


def each_expert(tensors: dict[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """Replaces such tensors by views: one for each expert and matrix, named as in checkpoints that store them
    one by one.

    Args:
        wanted: names of the model's tensors. Tensors with these names are kept.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = next((parts for end, parts in STACKED.items() if name.endswith(end)), ())
        if name in wanted or not parts or isinstance(tensor.array, StoredTensor) or tensor.array.ndim != 3:
            out[name] = tensor
            continue
        module, rows = name.rpartition(".")[0], tensor.array.shape[1] // len(parts)
        for expert, matrix in enumerate(dense(tensor.array)):
            for i, part in enumerate(parts):
                out[f"{module}.{expert}.{part}.weight"] = Tensor(
                    tensor.file, matrix[i * rows : (i + 1) * rows]
                )
    return out
