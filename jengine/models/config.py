"""The architecture of a model: fields that most families share, and parts that some have."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context. Fields as in Hugging Face configs."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
    factor: float
    original_max_position: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope: for each pair of channels, within the trained context
    long_factor: tuple[float, ...] = ()  # the same beyond it
    short_mscale: float | None = None  # attention_factor within and beyond it, where they differ
    long_mscale: float | None = None
    share: float = 1.0  # proportional: the share of a head's channels that rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary embedding.

    Attributes:
        dim: the number of a head's channels that rotate; None: all.
        local_theta: theta of layers with a window, if it differs from that of the others. Their frequencies
            are then not scaled.
        unrotated: layers that do not rotate.
        sections: how many of a head's frequencies turn with each of a position's three numbers (mrope); (): a
            position is one number.
        interleaved: whether frequencies take these numbers in turn, and not one section after the other.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    dim: int | None = None
    local_theta: float | None = None
    unrotated: tuple[int, ...] = ()
    sections: tuple[int, ...] = ()
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """What follows the product that computes logits.

    Attributes:
        bias: whether there is one.
        divisor: divides logits.
        soft_cap: a logit x becomes cap * tanh(x / cap).
    """

    bias: bool = False
    divisor: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The format of a checkpoint's quantized matrices, which they keep in memory.

    Attributes:
        form: numbers of a WeightFormat; int4 and e2m1 (of MXFP4) have a scale for each group of inputs, the
            others have one for each output unless there are groups.
        group: the number of inputs that share a scale; 0: all.
        offset: whether groups also have offsets.
        inputs: whether products quantize their other side too, with a scale for each row or, if weights have
            groups, each group; of int8 and float8_e4m3fn.
        others: regular expressions, matched from the start, for the names of modules that are stored in
            another format.
    """

    form: str
    group: int = 0
    offset: bool = False
    inputs: bool = False
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """How `jengine convert` quantized a folder's parameters, which are stored as programs take them.

    Attributes:
        quantization, group_size: the options quantization and quantization_group_size; stored: the form in
            which the checkpoint's file had them, see StoredWeights.
        calibrated: with calibration_data.
        revision: of the formats of parameters. With 1, fp8 included embeddings and output heads, and groups
            of four bits had offsets.
    """

    quantization: Literal["int4", "int4_mixed", "w4a8", "int8", "w8a8", "fp8", "stored"]
    group_size: int = 32
    calibrated: bool = False
    revision: int = 1


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
