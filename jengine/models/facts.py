"""Facts that follow from a model's declarations: what layers cache, sizes of matrices, what a program needs.

A module, such as attention or an MLP, declares what others must know of it:

- `cache(layer)`, of each layer's `attention`: its CacheEntry.
- `working(tokens)`: arrays that are live at once while it computes so many tokens. The model itself may have
  it, too.
- `batch_dependent(device)`: what in a row's result depends on the other rows of a program, or None.
- `num_experts`, `experts_per_token`: how many entries of axes named "experts" are no padding, and how many of
  them each token uses.
- `parallel`, of a layer: its attention and MLP read the same input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flax import nnx


@dataclass(frozen=True, slots=True)
class Working:
    """Arrays that are live at once, on one device; a generous count.

    Attributes:
        channels: of each token, in the dtype of activations.
        bytes: of all others.
    """

    channels: int = 0
    bytes: int = 0

    def __or__(self, other: Working) -> Working:
        """What suffices for two that are not needed at the same time."""
        return Working(max(self.channels, other.channels), max(self.bytes, other.bytes))


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a model's matrices, which are its parameters without norms, biases and positions. As in the
    checkpoint: without padding, and without copies for devices.

    Attributes:
        layers: of matrices that multiply each token, without experts and the output head.
        expert: of one expert of each layer that has any.
        experts, experts_per_token: number of experts, and how many of them a token uses; 0: there are none.
        head: of matrices that multiply each hidden state that becomes logits.
        tables: of embeddings that are only looked up.
    """

    layers: int
    expert: int
    experts: int
    experts_per_token: int
    head: int
    tables: int


def elements(module: Any, parameters: Iterable[tuple[Any, Any]]) -> Elements:
    """Counts the matrices among declared parameters, given with their paths."""
    layers, head, tables, expert = 0, 0, dict[str, int](), 0
    experts = max(declared(module, "num_experts"), default=0)
    for path, parameter in parameters:
        if not parameter.get_metadata("multiplies") or parameter.get_metadata("axes")[0] == "positions":
            continue
        tensors = {piece.name: math.prod(piece.shape) for piece in parameter.get_metadata("source")}
        count, axes = sum(tensors.values()), parameter.get_metadata("axes")
        if path[0] in module.head:
            head += count
        elif axes[0] == "vocab":
            tables[path[0]] = count
        elif axes[0] == "experts":
            expert += count // experts
        else:
            layers += count
    if module.lm_head is None:
        head += tables.pop("embed")
    return Elements(
        layers,
        expert,
        experts,
        max(declared(module, "experts_per_token"), default=0),
        head,
        sum(tables.values()),
    )


def declared(module: Any, name: str) -> Iterator[Any]:
    """What the parts of a module declare under this name."""
    return (getattr(part, name) for _, part in nnx.iter_modules(module) if hasattr(part, name))
