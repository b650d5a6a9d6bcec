"""Configurations that are refused, by the name and value of the field; fields that nothing reads."""

from __future__ import annotations

from typing import Any

import pytest

from jengine.base.errors import ModelError
from jengine.checkpoints.hugging_face import model_config
from jengine.models import build
from jengine.models.config import ModelConfig
from tests.golden.weights import VARIANTS


def read(variant: str, **changes: Any) -> ModelConfig:
    """Reads a configuration with changed fields; one changed to ... is left out."""
    return model_config(
        {name: value for name, value in {**VARIANTS[variant], **changes}.items() if value is not ...}
    )


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        (
            "gemma3n_text",
            {"intermediate_size": [48] * 5 + [40]},
            "is not supported; all 6 layers must have the same size",
        ),
        (
            "gemma3n_text",
            {"activation_sparsity_pattern": [0.5] * 5},
            "must give 6 layers shares from 0 to below 1",
        ),
        (
            "gemma3n_text",
            {"num_kv_shared_layers": 5},
            "num_kv_shared_layers=5 leaves no other layer with full_attention",
        ),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm=False is not supported; True is"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "lightning attention is not supported"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size=8 is not supported; 0 is"),
        (
            "minimax",
            {"layer_types": ["full_attention"] * 4},
            "of which some have full and some linear attention",
        ),
        (
            "minimax",
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types has 'sliding_attention'; full_attention and linear_attention",
        ),
        ("minimax", {"sliding_window": 30}, "sliding_window is not supported"),
        ("minimax_m1", {"attn_type_list": [0]}, "layer types must name 2 layers"),
        ("minimax_m1", {"postnorm": False}, "postnorm=False is not supported; True is"),
        ("minimax_m1", {"shared_intermediate_size": 8}, "shared_intermediate_size=8 is not supported; 0 is"),
        ("cohere", {"logit_scale": 0.0}, "logit_scale=0.0 must be above 0"),
        ("cohere2", {"sliding_window": None}, "a field has the wrong type or value"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm=true is not supported"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3 is not supported; 2 is"),
        (
            "phimoe",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope scaling 'linear' is not supported; default and longrope",
        ),
        (
            "phimoe_longrope_inside",
            {"rope_scaling": {**VARIANTS["phimoe_longrope_inside"]["rope_scaling"], "long_mscale": None}},
            "rope scaling has no long_mscale",
        ),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=true is not supported with experts"),
        ("glm4_moe", {"n_group": 3}, "n_routed_experts=8 is not a multiple of n_group=3"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; sigmoid is"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is not supported",
        ),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok=2 is not supported; 1 is"),
        (
            "llama4_text",
            {"layer_types": ["full_attention"] * 3},
            "layer_types must be chunked_attention for layers with rotary",
        ),
        ("lfm2", {"conv_bias": True}, "conv_bias=true is not supported"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "of which some are conv and some full_attention"),
        (
            "lfm2",
            {"layer_types": ["mamba"] * 4},
            "layer_types has 'mamba'; conv and full_attention are supported",
        ),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache=1 must be at least 2"),
        (
            "lfm2",
            {"num_attention_heads": 3, "head_dim": 16, "num_key_value_heads": 3},
            "hidden_size=64 is not a multiple of num_attention_heads=3",
        ),
        ("nemotron", {"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported"),
    ],
)
def test_settings_that_later_families_reject(variant: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(read(variant, **changes), "float32", 64)


@pytest.mark.parametrize(
    ("variant", "changes", "match"),
    [
        ("llama_gqa", {"sliding_window": 100}, "sliding_window is not supported"),
        ("llama_gqa", {"logits_scaling": 8.0}, "logits_scaling is not supported"),
        (
            "llama_gqa",
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "attn_factor": 0.5}},
            "rope scaling has attn_factor=0.5",
        ),
        (
            "llama_gqa",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "extrapolation_factor": 0.5}},
            "rope scaling has extrapolation_factor=0.5",
        ),
        (
            "llama_gqa",
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is not supported",
        ),
        ("mistral_window", {"attention_bias": True}, "attention_bias is not supported"),
        ("mistral_window", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be"),
        ("mistral_window", {"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        (
            "qwen2_window",
            {"layer_types": ["sliding_attention"]},
            "layer_types has 1 layers, num_hidden_layers is 3",
        ),
        (
            "qwen2_window",
            {"layer_types": ["chunked_attention"] * 3},
            "layer_types has 'chunked_attention'; full_attention and",
        ),
        (
            "phi3_longrope_beyond",
            {"partial_rotary_factor": 1.0},
            "short_factor has 6 numbers; 16 channels rotate and need 8",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "rope scaling 'yarn' of sliding_attention is not",
        ),
        (
            "gemma3",
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
            "rope_parameters must have full_attention and sliding_attention",
        ),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is not supported",
        ),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is not supported"),
        (
            "opt_125m",
            {"layer_norm_elementwise_affine": False},
            "layer_norm_elementwise_affine is not supported",
        ),
        ("opt_125m", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm is not supported"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 layers, num_hidden_layers is 3"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv is not supported"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "rope scaling 'yarn' of sliding_attention is not",
        ),
        (
            "starcoder2",
            {"rope_scaling": {"rope_type": "proportional"}},
            "rope scaling 'proportional' is not supported",
        ),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is not supported"),
        ("falcon_7b", {"alibi": True}, "alibi is not supported"),
        (
            "falcon_40b",
            {"parallel_attn": False},
            "parallel_attn=False is not supported with new_decoder_architecture",
        ),
        (
            "falcon_7b",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is not supported",
        ),
        (
            "ministral3",
            {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta=0.1 is not supported without rope",
        ),
        (
            "mistral3",
            {"text_config": {"model_type": "mistral4"}},
            "text_config.model_type 'mistral4' is not supported",
        ),
        ("gemma3_images", {"text_config": ...}, "field 'text_config' is missing"),
        (
            "gemma3_images",
            {"quantization_config": {"quant_method": "nvfp4"}},
            "quantization_config.quant_method .nvfp4. is not supported",
        ),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be from 1 to 4, the experts"),
    ],
)
def test_refused(variant: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {match}"):
        read(variant, **changes)


def test_unknown_fields_cause_a_warning() -> None:
    known = read("llama_gqa")
    fields = {**VARIANTS["llama_gqa"], "some_new_feature": True}
    with pytest.warns(UserWarning, match="some_new_feature") as caught:
        assert model_config(fields, "a/config.json") == known
        model_config(fields, "a/config.json")
    text = "a/config.json: some_new_feature=true is unknown to jengine and has no effect"
    # once, although several parts of an engine read the file
    assert [str(warning.message) for warning in caught] == [text]
    with pytest.warns(UserWarning, match=r"new_list=\[0, 1, .*\.\.\. is unknown"):
        read("llama_gqa", new_list=list(range(100)))


@pytest.mark.parametrize("name", ["_name_or_path", "_model_name_or_path"])
def test_where_a_folder_came_from_has_no_effect(name: str) -> None:
    assert read("llama_gqa", **{name: "a/folder"}) == read("llama_gqa")


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_unknown_fields_without_a_value_do_not(value: object) -> None:
    assert read("llama_gqa", some_new_feature=value) == read("llama_gqa")


def test_only_the_text_models_fields_count() -> None:
    assert read("gemma3_images", image_feature=True) == read("gemma3_images")
    text = {**VARIANTS["gemma3_images"]["text_config"], "text_feature": 2}
    with pytest.warns(UserWarning, match="text_feature=2 is unknown"):
        read("gemma3_images", text_config=text)
