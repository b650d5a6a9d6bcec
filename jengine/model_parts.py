"""Parts of a model's shape that some families have: plain data, fields of `ModelConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context. Fields as in Hugging Face configs."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
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
    long_factor: tuple[float, ...] = ()  # and beyond it


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The format of a checkpoint's quantized matrices, which they keep in memory.

    Attributes:
        form: number format; int4 and e2m1 (of MXFP4) have a scale for each group of inputs, the others have one for each output.
        group: the number of inputs that share a scale.
        offset: whether groups also have offsets.
        others: regular expressions, matched from the start, for the names of modules that are stored in another format.
    """

    form: Literal["int4", "e2m1", "int8", "float8_e4m3fn"]
    group: int = 0
    offset: bool = False
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: one vector a token is cached, from which all heads' keys and values are made.

    Attributes:
        rank: channels of that vector from which they are made.
        query_rank: the same of queries, which are not cached; None: they are made from hidden states.
        key_dim: channels of a head's query and key that do not rotate.
        rotary_dim: those that do; all heads share the key's, which are cached too.
        value_dim: channels of a head's value.
        interleaved: in the checkpoint channels rotate with their neighbours.
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
        """Channels of what is cached of a token."""
        return self.rank + self.rotary_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers that keep a recurrent state in place of keys and values: gated delta nets. Fields as in Hugging Face configs.

    Attributes:
        layers: which they are.
        key_heads: of queries and of keys; each is shared by as many consecutive ones of value_heads.
        key_dim, value_dim: channels of a head.
        taps: of the convolution over queries, keys and values: tokens that each sees, itself included.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Of a key head's query, its key and its values."""
        return 2 * self.key_dim + self.group * self.value_dim
