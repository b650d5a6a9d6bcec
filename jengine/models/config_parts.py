"""Plain data in fields of `ModelConfig`: rotary embedding, the output head, and formats of weights."""

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
        revision: of the formats of parameters. With 1, fp8 included embeddings and output heads.
    """

    quantization: Literal["int4", "int4_mixed", "w4a8", "int8", "w8a8", "fp8", "stored"]
    group_size: int = 128
    calibrated: bool = False
    revision: int = 1
