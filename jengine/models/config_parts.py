"""Optional parts of a model's architecture: plain data, used as fields of `ModelConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
class StoredWeights:
    """The format of a checkpoint's quantized matrices, which they keep in memory.

    Attributes:
        form: number format; int4 and e2m1 (of MXFP4) have a scale for each group of inputs, the others have
            one for each output unless there are groups.
        group: the number of inputs that share a scale; 0: all.
        offset: whether groups also have offsets.
        others: regular expressions, matched from the start, for the names of modules that are stored in
            another format.
    """

    form: Literal["int4", "e2m1", "int8", "float8_e4m3fn"]
    group: int = 0
    offset: bool = False
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """How `jengine convert` quantized a folder's parameters, which are stored as programs take them.

    Attributes:
        quantization, group_size: the options quantization and quantization_group_size; stored: the form in
            which the checkpoint's file had them, see StoredWeights.
        calibrated: with calibration_data.
        revision: of the formats of parameters. With 1, fp8 included embeddings and output heads.
    """

    quantization: Literal["int4", "int4_mixed", "int8", "w8a8", "fp8", "stored"]
    group_size: int = 128
    calibrated: bool = False
    revision: int = 1


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
class LayerInputs:
    """An embedding of each token for each layer, which the layer adds to the residual stream through a gate.

    Attributes:
        size: channels per layer.
        vocab_size: rows of the embedding table, which holds the channels of all layers.
    """

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUp:
    """Several residual streams, of which layers compute one. Fields as in Hugging Face configs.

    Attributes:
        active: index of the stream that layers compute.
        scaled: whether this stream is scaled per channel before the gate of the layer's own embedding.
        laurel_rank: rank of the shortcut beside attention.
        sparsity: share of the MLP's gates that each layer drops.
    """

    streams: int
    active: int
    scaled: bool
    laurel_rank: int
    sparsity: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualFactors:
    """Factors in layers whose residual stream is normed: of the stream, and of what is added to it.

    Attributes:
        full, linear: where attention is added, in layers with full and with linear attention.
        mlp: where an MLP is added.
    """

    full: tuple[float, float]
    linear: tuple[float, float]
    mlp: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: caches one vector per token, from which the keys and values of all heads
    are computed.

    Attributes:
        rank: channels of that vector, without the rotating ones.
        query_rank: channels of the corresponding vector for queries, which is not cached; None: queries are
            computed from hidden states.
        key_dim: non-rotating channels of a head's query and key.
        rotary_dim: rotating channels. All heads share the key's, which are cached too.
        value_dim: channels of a head's value.
        interleaved: whether channels rotate with their neighbours in the checkpoint.
    """

    rank: int
    query_rank: int | None
    key_dim: int
    rotary_dim: int
    value_dim: int
    interleaved: bool = True

    @property
    def query_dim(self) -> int:
        """Channels of a head's query."""
        return self.key_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Channels cached for a token."""
        return self.rank + self.rotary_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers that keep a state instead of keys and values: gated delta nets, convolutions alone, or lightning
    attention. Fields as in Hugging Face configs.

    Attributes:
        layers: indices of these layers.
        key_heads: number of query heads and of key heads; each is shared by the same number of consecutive
            value_heads.
        key_dim, value_dim: channels of a head. If there is no recurrence, key_dim is 0, and only values are
            convolved.
        taps: width of the convolution over queries, keys and values, in tokens. Without a convolution: 0.
        delta: whether the recurrence is the gated delta rule; otherwise it is linear attention with constant
            decays.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    delta: bool = True

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Channels of a key head's query, key and values together."""
        return 2 * self.key_dim + self.group * self.value_dim
