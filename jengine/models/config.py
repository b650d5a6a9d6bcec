"""The architecture of a model, in fields that all families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jengine.models.config_parts import (
    AltUp,
    Converted,
    FullAttention,
    LatentAttention,
    LayerInputs,
    LinearAttention,
    ResidualFactors,
    RopeScaling,
    StoredWeights,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder-only transformer, in fields that all families share.

    Attributes:
        max_position: the most tokens of a sequence; with learned positions, the length of their table.
        rotary_dim: the number of a head's channels that rotate; None: all.
        local_rope_theta: rope_theta of layers with a window, if it differs from that of the others. Their
            frequencies are then not scaled.
        unrotated_layers: layers without rotary embedding.
        query_scaling_beta: a query at position p is multiplied by 1 + beta * log(1 + p //
            rope_scaling.original_max_position); in Llama 4, in unrotated layers alone, by 1 + beta * log(1 +
            (p + 1) // query_scaling_step).
        windows: for each layer, how many tokens a query sees, itself included; None: all. An empty tuple:
            all, in every layer.
        linear: layers with a recurrent state in place of attention.
        full_attention: heads of layers without a window, if they differ.
        shared_kv_layers: so many layers at the end read the keys and values of the last one before them with
            the same window.
        double_wide_mlp: in these layers, MLPs are twice as wide.
        layer_inputs, altup: embeddings of tokens for each layer; several residual streams.
        attention_gate: what attention gives is multiplied by a gate for each channel.
        attention_scale: multiplies scores; None is head_dim ** -0.5.
        alibi: scores decrease with the distance between query and key, by a slope for each head.
        attention_soft_cap, logit_soft_cap: x becomes cap * tanh(x / cap).
        norm_offset: added to the weight of every norm.
        pre_norm: norms come before attention and MLP, and there is one at the end; otherwise they come after
            each.
        parallel_residual: attention and MLP of a layer read the same input, and both results are added to it.
        shared_norm: with parallel_residual, they share one norm.
        qk_norm: queries and keys are normalized; for families whose checkpoints differ in this.
        clip_qkv: the largest absolute value of queries, keys and values; None: no limit.
        embedding_multiplier, residual_multiplier: factors of embeddings, and of what attention and MLP add.
        residual_factors: factors of layers that norm the residual stream itself; None: layers do not.
        logits_scaling: divides logits.
        head_bias: the output head has a bias.
        gated_mlp: an MLP has three matrices, gate, up and down; otherwise two.
        embedding_size: size of token embeddings, which are projected to and from hidden_size; None:
            hidden_size, without projections.
        expert_layers: which layers route tokens to experts.
        expert_size: an expert's intermediate size.
        shared_expert_size: intermediate size of the expert that computes all tokens; 0: there is none.
        shared_expert_gate: the result of this expert is multiplied by a gate.
        normalize_experts: the chosen experts' probabilities are scaled to a sum of 1.
        router: the function that turns a router's results into experts' scores.
        router_jitter: experts whose scores are within a share of 2 router_jitter below the best one compete
            with it (SparseMixer).
        expert_groups, expert_groups_kept: experts form expert_groups groups; a token chooses among those of
            its best expert_groups_kept.
        routed_scaling: multiplies the experts' results.
        swiglu_alpha, swiglu_limit: of gpt-oss's experts, with gate at most limit, and up within plus and
            minus limit: gate * sigmoid(alpha * gate) * (up + 1).
        latent: heads share keys and values in a compressed form; None: they have their own.
        stored: the format of quantized matrices; None: they are not quantized, or are to be converted to
            dtype.
        shards: the number of devices that the parameters are laid out for. Kv heads are repeated if there are
            fewer of them than devices; heads, intermediate sizes and the vocabulary are padded with zeros to
            a multiple. The other fields have the checkpoint's values.
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
    pre_norm: bool = True
    parallel_residual: bool = False
    shared_norm: bool = False
    qk_norm: bool = False
    clip_qkv: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    residual_factors: ResidualFactors | None = None
    logits_scaling: float = 1.0
    head_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    local_rope_theta: float | None = None
    unrotated_layers: tuple[int, ...] = ()
    query_scaling_beta: float = 0.0
    query_scaling_step: int = 0
    windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    alibi: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    activation: str = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False  # of attention
    mlp_bias: bool = False
    tie_embeddings: bool = False
    embedding_size: int | None = None
    expert_layers: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    shared_expert_gate: bool = False
    normalize_experts: bool = False
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_jitter: float = 0.0
    expert_groups: int = 1
    expert_groups_kept: int = 1
    routed_scaling: float = 1.0
    swiglu_alpha: float = 1.0
    swiglu_limit: float = 0.0
    dtype: str = "float32"  # of the checkpoint
    eos_token_ids: tuple[int, ...] = ()
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    full_attention: FullAttention | None = None
    shared_kv_layers: int = 0
    double_wide_mlp: bool = False
    layer_inputs: LayerInputs | None = None
    altup: AltUp | None = None
    attention_gate: bool = False
    stored: StoredWeights | None = None
    converted: Converted | None = None  # how `jengine convert` quantized the parameters, if it did
    shards: int = 1

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
