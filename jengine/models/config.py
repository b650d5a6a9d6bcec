"""The architecture of a model: fields that most families share, and parts that some have."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from jengine.models.config_parts import Converted, OutputHead, Rotary, StoredWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder-only transformer.

    Attributes:
        intermediate_size: of MLPs without experts.
        max_position: the most tokens of a sequence; with learned positions, the length of their table.
        norm_offset: added to the weight of every norm.
        embedding_multiplier: a factor of embeddings.
        windows: for each layer, how many tokens a query sees, itself included; None: all. An empty tuple:
            all, in every layer.
        attention_scale: multiplies scores; None is head_dim ** -0.5.
        attention_soft_cap: a score x becomes cap * tanh(x / cap).
        qk_norm: queries and keys are normalized; for families whose checkpoints differ in this.
        output_bias: of attention.
        dtype: of the checkpoint.
        parts: what only some families have, such as experts: dataclasses that models/ declares. `part` and
            `find` look them up.
        stored: the format of quantized matrices; None: they are not quantized, or are to be converted to
            dtype.
        quantized_inputs: how the checkpoint's quantization rounds the inputs of products, such as "float8
            static by tensor"; "": not at all. `stored` says whether products here do so.
        prefix_lm: the tokens of a prompt see each other; generated tokens see those before them.
        converted: how `jengine convert` quantized the parameters, if it did.
        shards: the number of devices that the parameters are laid out for. Kv heads are repeated if there are
            fewer of them than devices; heads, intermediate sizes and the vocabulary are padded with zeros to
            a multiple. The other fields have the checkpoint's values.
        expert_shards: the number of devices among which whole experts are divided, padded with experts that
            no token chooses; 1: each expert is divided among the devices of `shards`.
    """

    family: str  # Hugging Face's model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    activation: str = "silu"
    embedding_multiplier: float = 1.0
    rope: Rotary = field(default_factory=Rotary)
    windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    prefix_lm: bool = False
    head: OutputHead = field(default_factory=OutputHead)
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    parts: tuple[Any, ...] = ()
    stored: StoredWeights | None = None
    quantized_inputs: str = ""
    converted: Converted | None = None
    shards: int = 1
    expert_shards: int = 1

    def find[T](self, kind: type[T]) -> T | None:
        """The part of this type, or None if the model has none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def part[T](self, kind: type[T]) -> T:
        """The part of this type, which the model has."""
        part = self.find(kind)
        assert part is not None, f"{self.family} declares no {kind.__name__}"
        return part

    def plain(self) -> dict[str, Any]:
        """Nested dicts of all fields. Parts have the names of their types."""
        return {
            **dataclasses.asdict(self),
            "parts": {type(part).__name__: dataclasses.asdict(part) for part in self.parts},
        }

    @property
    def group(self) -> int:
        """Query heads that share a kv head, in the checkpoint."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_repeats(self) -> int:
        """Copies of each kv head, each for a part of its query heads."""
        return -(-self.shards // self.num_kv_heads)

    @property
    def num_kv_heads_padded(self) -> int:
        """The number of kv heads in this layout, over all devices."""
        return self.padded(self.num_kv_heads * self.kv_repeats)

    @property
    def group_size_padded(self) -> int:
        """Query heads that share a kv head, in this layout."""
        return -(-self.group // self.kv_repeats)

    def padded(self, size: int) -> int:
        """Round up to a multiple of the number of devices."""
        return -(-size // self.shards) * self.shards

    def window(self, layer: int) -> int | None:
        """How many tokens a query sees in a layer, itself included; None: all."""
        return self.windows[layer] if self.windows else None
