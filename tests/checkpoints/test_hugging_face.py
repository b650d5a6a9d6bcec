"""Conversion of each family's configuration, and rejected fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jengine.base.errors import ModelError
from jengine.checkpoints.hugging_face import model_config
from jengine.models import FAMILIES
from jengine.models.config import ModelConfig
from jengine.models.deepseek import GroupRouting
from jengine.models.gemma import AltUp
from jengine.models.gpt import OptLayers
from jengine.models.granite import ResidualMultiplier
from jengine.models.minimax import ResidualFactors
from jengine.models.mistral import QueryScaling
from jengine.models.moe import MixtureOfExperts
from jengine.models.olmo import ClippedQkv
from jengine.models.phi3 import Competition
from jengine.models.recurrent import LinearAttention
from jengine.models.residuals import ParallelResidual
from jengine.models.rope import rope
from tests.golden.declaring import YARN
from tests.golden.weights import VARIANTS

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def read(variant: str, **changes: Any) -> ModelConfig:
    """Reads a configuration with changed fields; one changed to ... is left out."""
    return model_config(
        {name: value for name, value in {**VARIANTS[variant], **changes}.items() if value is not ...}
    )


def test_every_family_has_a_golden_test() -> None:
    assert set(FAMILIES) == {config["model_type"] for config in VARIANTS.values()}


def test_unknown_family() -> None:
    with pytest.raises(
        ModelError, match=r"config\.json: model_type 'unheard_of' is not supported; .*llama.* are"
    ):
        read("llama_gqa", model_type="unheard_of")


def test_names_of_draft_heads_are_no_models() -> None:
    for head in ("eagle3", "deepseek_v3_mtp"):
        with pytest.raises(ModelError, match=f"model_type '{head}' is not supported"):
            read("llama_gqa", model_type=head)


def test_classifiers_are_refused_by_name() -> None:
    for family in ({}, {"model_type": "bert"}):
        with pytest.raises(
            ModelError, match=r"LlamaForSequenceClassification has a classification head; cross-encoders"
        ):
            read("llama_gqa", architectures=["LlamaForSequenceClassification"], **family)


def test_mistral_has_a_window_unless_it_says_no() -> None:
    assert read("mistral_window").windows == (24, 24)
    assert read("mistral_window", sliding_window=None).windows == ()
    assert read("mistral_window", sliding_window=...).windows == (4096, 4096)


def test_layer_types_may_say_what_a_family_does() -> None:
    full, sliding = ["full_attention"] * 2, ["sliding_attention"] * 2
    assert read("mistral_window", layer_types=sliding) == read("mistral_window")
    assert read("mistral_window", layer_types=full, sliding_window=None).windows == ()
    assert read("llama_gqa", layer_types=full) == read("llama_gqa")
    for variant, types in (("mistral_window", full), ("llama_gqa", sliding)):
        with pytest.raises(ModelError, match="layer_types must be"):
            read(variant, layer_types=types)


def test_qwen2_windows_are_used_when_asked_for() -> None:
    assert read("qwen2_untied", sliding_window=32, max_window_layers=0).windows == ()
    assert read("qwen2_window").windows == (None, 70, 70)
    assert read(
        "qwen2_window", layer_types=["sliding_attention", "full_attention", "full_attention"]
    ).windows == (70, None, None)
    assert (read("qwen2_untied").qkv_bias, read("qwen2_untied").output_bias) == (True, False)


def test_phi3_rotates_a_share_of_a_head() -> None:
    config = read("phi3_longrope_beyond")
    assert (config.head_dim, config.rope.dim) == (16, 12)
    assert config.rope.scaling is not None
    assert (
        config.rope.scaling.kind,
        config.rope.scaling.factor,
        config.rope.scaling.original_max_position,
    ) == ("longrope", 4.0, 64)
    old = {**VARIANTS["phi3_longrope_beyond"]["rope_scaling"], "type": "su"}
    assert read("phi3_longrope_beyond", rope_scaling=old) == config


def test_gemma_takes_transformers_defaults() -> None:
    absent = (
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
        "tie_word_embeddings",
    )
    config = read("gemma2", **dict.fromkeys(absent, ...))
    assert (config.attention_scale, config.attention_soft_cap, config.head.soft_cap) == (1 / 16, 50.0, 30.0)
    assert (config.windows, config.tie_embeddings, config.norm_offset) == ((4096, None, 4096), True, 1.0)
    config = read(
        "gemma3",
        **dict.fromkeys(
            (*absent, "sliding_window_pattern", "rope_theta", "rope_local_base_freq", "rope_scaling"), ...
        ),
    )
    assert (config.attention_soft_cap, config.head.soft_cap, config.windows) == (
        None,
        None,
        (4096, 4096, 4096),
    )
    assert (config.rope.theta, config.rope.local_theta, config.rope.scaling) == (1e6, 10000.0, None)


def test_gemma3_old_and_new_spelling_of_rope() -> None:
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    without = dict.fromkeys(("rope_theta", "rope_local_base_freq", "rope_scaling"), ...)
    assert read("gemma3", **without, rope_parameters=new) == read("gemma3")


def test_experts() -> None:
    config = read("mixtral")
    assert (
        config.part(MixtureOfExperts).layers,
        config.part(MixtureOfExperts).count,
        config.part(MixtureOfExperts).per_token,
        config.part(MixtureOfExperts).size,
    ) == ((0, 1), 4, 2, 48)
    assert config.part(MixtureOfExperts).normalize
    assert read("qwen3_moe_mixed").part(MixtureOfExperts).layers == (0, 2)
    assert read("qwen3_moe_mixed", mlp_only_layers=[], decoder_sparse_step=2).part(
        MixtureOfExperts
    ).layers == (1,)
    assert not read("qwen3_moe", norm_topk_prob=...).part(MixtureOfExperts).normalize


def test_smollm3_has_layers_without_rotation() -> None:
    assert read("smollm3").rope.unrotated == (1,)
    config = read("smollm3", no_rope_layers=..., num_hidden_layers=8)
    assert (config.rope.unrotated, config.windows) == ((3, 7), ())
    assert read("smollm3_window").windows == (None, 30, None), "only layers without rotation have windows"


def test_olmo3_stretches_only_layers_without_a_window() -> None:
    config = read("olmo3")
    assert config.windows == (30, 30, 30, None)
    assert (config.rope.theta, config.rope.local_theta) == (5e5, 5e5)
    assert config.rope.scaling is not None and config.rope.scaling.attention_factor == 1.1
    new = {
        "full_attention": {**VARIANTS["olmo3"]["rope_scaling"], "rope_theta": 5e5},
        "sliding_attention": {"rope_theta": 5e5},
    }
    assert read("olmo3", rope_scaling=..., rope_theta=..., rope_parameters=new) == config
    flat = new["full_attention"]
    assert read("olmo3", rope_scaling=..., rope_theta=..., rope_parameters=flat) == config


def test_granites_multipliers() -> None:
    config = read("granite")
    assert (
        config.attention_scale,
        config.embedding_multiplier,
        config.part(ResidualMultiplier).factor,
        config.head.divisor,
    ) == (
        0.3,
        3.0,
        0.6,
        2.5,
    )
    absent = read(
        "granite", **dict.fromkeys([f"{x}_multiplier" for x in ("attention", "embedding", "residual")], ...)
    )
    assert (absent.attention_scale, absent.embedding_multiplier, absent.part(ResidualMultiplier).factor) == (
        1.0,
        1.0,
        1.0,
    )


def test_families_with_routed_experts() -> None:
    config = read("glm4_moe")
    experts, routing = config.part(MixtureOfExperts), config.part(GroupRouting)
    assert (config.rope.dim, config.qkv_bias, config.output_bias, config.qk_norm, experts.layers) == (
        10,
        True,
        False,
        True,
        (1, 2),
    )
    assert (routing.groups, routing.groups_kept, experts.shared_size, routing.scores) == (4, 2, 24, "sigmoid")
    assert read("ernie4_5_moe").part(MixtureOfExperts).layers == (1, 2)
    assert read("ernie4_5_moe", moe_layer_interval=2).part(MixtureOfExperts).layers == (1,)
    assert (read("minimax_m2").rope.dim, read("minimax_m2", rotary_dim=...).rope.dim) == (8, None)


def test_llama4_ends_with_a_chunk() -> None:
    config = read("llama4_text", attention_chunk_size=128)
    assert (config.max_position, config.rope.unrotated, config.part(MixtureOfExperts).layers) == (
        128,
        (1,),
        (1,),
    )
    assert read("llama4_text", no_rope_layers=..., num_hidden_layers=8).rope.unrotated == (3, 7)


def test_lfm2_adjusts_its_intermediate_size() -> None:
    config = read("lfm2")
    linear = config.part(LinearAttention)
    assert linear.layers == (0, 2)
    assert (config.intermediate_size, read("lfm2", block_auto_adjust_ff_dim=False).intermediate_size) == (
        96,
        112,
    )
    assert read("lfm2", layer_types=..., full_attn_idxs=[1, 2]).part(LinearAttention) == dataclasses.replace(
        linear, layers=(0, 3)
    )
    assert not read("lfm2", tie_embedding=False).tie_embeddings


def test_exaone4_rotates_layers_with_a_window_if_there_are_any() -> None:
    assert (read("exaone4").windows, read("exaone4").rope.unrotated) == ((30, 30, 30, None), (3,))
    assert read("exaone4", sliding_window_pattern="LLLG") == read("exaone4")
    assert (read("exaone4_full").windows, read("exaone4_full").rope.unrotated) == ((), ())


def test_cohere2_rotates_only_layers_with_a_window() -> None:
    config = read("cohere2")
    assert (config.windows, config.rope.unrotated, config.head.divisor) == ((30, 30, 30, None), (3,), 1 / 0.3)
    assert read("cohere2", sliding_window_pattern=...) == config
    wide = read("cohere2_wide")
    assert (wide.windows, wide.rope.unrotated) == ((None, 250), (0,))
    absent = read(
        "cohere", **dict.fromkeys(("logit_scale", "layer_norm_eps", "rope_theta", "tie_word_embeddings"), ...)
    )
    assert (absent.head.divisor, absent.norm_eps, absent.rope.theta, absent.tie_embeddings) == (
        16.0,
        1e-5,
        5e5,
        True,
    )


def test_minimax_has_two_spellings() -> None:
    config = read("minimax_m1")
    linear = config.part(LinearAttention)
    assert (linear.layers, linear.taps) == ((0,), 0)
    assert config.part(ResidualFactors) == ResidualFactors(full=(2.0, 0.7), linear=(0.8, 1.5), mlp=(1.3, 0.6))
    assert dataclasses.replace(read("minimax_m1", model_type="minimax"), family="minimax_m1") == config
    unscaled = ResidualFactors(full=(1.0, 1.0), linear=(1.0, 1.0), mlp=(1.0, 1.0))
    assert read("minimax_text_01").part(ResidualFactors) == unscaled
    alternating = read("minimax").part(LinearAttention)
    assert alternating is not None and alternating.layers == (1, 3)
    assert read("minimax", rotary_dim=12).rope.dim == 12 and read("minimax").rope.dim is None


def test_experts_of_families_that_came_later() -> None:
    config = read("qwen2_moe")
    assert (config.part(MixtureOfExperts).layers, config.qkv_bias, config.output_bias, config.windows) == (
        (0, 2),
        True,
        False,
        (),
    )
    assert (config.part(MixtureOfExperts).shared_size, config.part(MixtureOfExperts).normalize) == (40, False)
    config = read("qwen2_moe_ties")
    assert (config.part(MixtureOfExperts).layers, config.qkv_bias, config.windows) == (
        (1,),
        False,
        (30, None, None),
    )
    assert (
        read("olmoe_ties").find(ClippedQkv),
        read("olmoe").find(ClippedQkv),
        read("olmoe").part(MixtureOfExperts).normalize,
    ) == (
        ClippedQkv(limit=0.8),
        None,
        False,
    )
    assert (read("granitemoe").attention_scale, read("granitemoe").part(ResidualMultiplier).factor) == (
        0.3,
        0.6,
    )
    config = read("phimoe", router_jitter_noise=..., num_local_experts=...)
    assert (
        config.part(Competition).jitter,
        config.part(MixtureOfExperts).count,
        config.head.bias,
        config.windows,
    ) == (
        0.01,
        16,
        True,
        (250, 250),
    )


def test_phimoes_magnitudes_depend_on_the_longest_sequence() -> None:
    config = read("phimoe_longrope_inside")
    short, long = rope(config, 64), rope(config, 65)
    assert (short.magnitude, long.magnitude) == (0.9, 1.2)
    assert short.frequencies == pytest.approx([2 * frequency for frequency in long.frequencies])


def test_gemma3n_has_defaults_for_sparsity_and_windows() -> None:
    config = read(
        "gemma3n_text",
        num_hidden_layers=12,
        intermediate_size=48,
        layer_types=...,
        activation_sparsity_pattern=...,
    )
    assert config.part(AltUp).sparsity == (0.95,) * 10 + (0.0,) * 2
    assert [i for i in range(12) if config.window(i) is None] == [4, 9]


def test_shares_of_a_head_that_rotate() -> None:
    assert (
        read("glm4").head_dim,
        read("glm4").rope.dim,
        read("glm4", partial_rotary_factor=...).rope.dim,
    ) == (20, 10, 10)
    assert (read("glm4").qkv_bias, read("glm4").output_bias) == (True, False)
    assert read("stablelm", partial_rotary_factor=...).rope.dim == 4
    assert read("phi", partial_rotary_factor=0.25).rope.dim == 4
    assert read("gpt_neox", rotary_pct=0.5).rope.dim == 8
    assert read("gpt_neox_serial").rope.dim is None
    new = {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
    config = read("gpt_neox", rope_parameters=new)
    assert (config.rope.theta, config.rope.dim) == (500.0, 8)


def test_the_first_gemmas_mean_the_approximation() -> None:
    assert read("gemma").activation == "gelu_pytorch_tanh"
    assert read("gemma", hidden_activation="silu").activation == "silu"
    assert read("gemma").embedding_multiplier == 8.0


def test_falcons_layouts() -> None:
    layouts = {name: read(f"falcon_{name}") for name in ("7b", "11b", "40b", "serial")}
    assert {name: (c.num_kv_heads, c.find(ParallelResidual)) for name, c in layouts.items()} == {
        "7b": (1, ParallelResidual(shared_norm=True)),
        "11b": (2, ParallelResidual(shared_norm=True)),
        "40b": (2, ParallelResidual(shared_norm=False)),
        "serial": (8, None),
    }


def test_text_models_of_models_with_images() -> None:
    config = read("gemma3_images", eos_token_id=[1, 106])
    assert config.eos_token_ids == (1, 106)
    assert dataclasses.replace(config, family="gemma3_text", eos_token_ids=()) == model_config(
        VARIANTS["gemma3_images"]["text_config"]
    )
    few = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    config = model_config({"model_type": "gemma3", "text_config": few})  # as published
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    text = {"rope_parameters": VARIANTS["ministral3"]["rope_parameters"], **VARIANTS["ministral3"]}
    config = read("mistral3", text_config=text, tie_word_embeddings=True)
    assert config.part(QueryScaling).beta == 0.4
    assert text["tie_word_embeddings"] is False and config.tie_embeddings, "the whole model's flag counts"
    assert read(
        "mistral3", text_config={**VARIANTS["mistral3"]["text_config"], "sliding_window": 8}
    ).windows == (8, 8)


def test_opt_350m_is_the_odd_one() -> None:
    config = read("opt_350m")
    assert (config.part(OptLayers), config.hidden_size) == (OptLayers(pre_norm=False, embedding_size=32), 64)
    assert read("opt_125m").part(OptLayers) == OptLayers(pre_norm=True, embedding_size=64)


def test_both_names_of_ernies_experts() -> None:
    assert read("ernie4_5_moe", moe_k=..., num_experts_per_tok=2).part(MixtureOfExperts).per_token == 2
    assert read("ernie4_5_moe", moe_k=2, num_experts_per_tok=...).part(MixtureOfExperts).per_token == 2


@pytest.mark.parametrize(
    ("variant", "whole", "text", "tied"),
    [
        ("qwen3_vl_moe", False, True, False),
        ("qwen3_vl_moe", True, False, True),
        ("qwen3_vl_moe", ..., ..., False),
        ("smolvlm", False, True, False),
        ("gemma3_images", ..., ..., True),
        ("gemma3_images", False, True, False),
        ("llama4", True, False, False),  # whose text model has the head
    ],
)
def test_the_whole_models_flag_ties_the_head(variant: str, whole: Any, text: Any, tied: bool) -> None:
    """As in transformers."""
    inner = {**VARIANTS[variant]["text_config"], "tie_word_embeddings": text}
    inner = {name: value for name, value in inner.items() if value is not ...}
    assert read(variant, text_config=inner, tie_word_embeddings=whole).tie_embeddings is tied


def test_fields_of_both_levels() -> None:
    text = {**VARIANTS["qwen3_vl"]["text_config"], "dtype": "float16", "eos_token_id": 3}
    text["quantization_config"] = {"quant_method": "bitsandbytes"}
    config = read(
        "qwen3_vl", text_config=text, torch_dtype="bfloat16", eos_token_id=[5, 6], quantization_config=FP8
    )
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (5, 6)) and config.stored is not None


@pytest.mark.parametrize(
    ("variant", "changes", "says"),
    [
        ("llama_gqa", {"num_hidden_layers": 2**31}, "num_hidden_layers=2147483648 must be at most 4096"),
        ("llama_gqa", {"num_hidden_layers": 1025}, "num_layers=1025 must be at most 1024"),
        ("qwen3_moe", {"num_experts": 2**31 - 1}, "num_experts=2147483647 must be at most 4096"),
        ("llama_gqa", {"vocab_size": 2**70}, "vocab_size=.* must be at least 1 and at most 2147483647"),
        ("llama_gqa", {"head_dim": 2**30}, "channels of a head rotate; at most 65536 can"),
        ("llama_gqa", {"hidden_size": []}, "a field has the wrong type or value"),
        ("llama_gqa", {"rms_norm_eps": 10**400}, "a field has the wrong type or value"),
        ("llama_gqa", {"eos_token_id": [1, "2"]}, "is neither a token id nor a list of them"),
        ("rope_yarn", {"rope_scaling": {**YARN, "beta_slow": 0.0}}, "a field has the wrong type or value"),
    ],
)
def test_numbers_are_checked_before_anything_loops_over_them(
    variant: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=f"config.json: .*{says}"):
        read(variant, **changes)
