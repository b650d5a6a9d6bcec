"""Converts a Hugging Face config.json to a ModelConfig, with the reader of its family (`jengine/models`).

A field that affects the model's results, and that the family's reader has not read, is rejected if it is in
UNLESS_READ. Any other that jengine does not know causes a warning.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from jengine.base.errors import ModelError
from jengine.base.model_files import malformed
from jengine.checkpoints.quantized_formats import quantization_config, quantized_inputs, stored_weights
from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields, TextPart
from jengine.models.hf_config import MAX_SIZE, check
from jengine.models.registry import DRAFT_HEADS, FAMILIES, read, supported

UNLESS_READ: dict[str, object] = {  # values that, like null, have no effect
    "_remove_final_layer_norm": False,
    "add_cross_attention": False,
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_bias": False,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "layer_norm_elementwise_affine": True,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "qk_layernorm": False,
    "residual_multiplier": 1.0,
    "scale_attn_by_inverse_layer_idx": False,
    "sliding_window": None,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
}

# Names of fields that are numbers of layers, experts or other parts, over which readers and models loop.
COUNTS = re.compile(r"(.*_)?(depth|experts?|groups?|heads|inputs|layers?|modules)")
MAX_COUNT = 4096

# Fields that do not change what a model computes, or only in training. Patterns as in a shell.
HARMLESS = (
    # About the file
    "*name_or_path", "architectures", "auto_map", "*dtype", "model_type", "transformers*",
    "unsloth*", "_commit_hash", "custom_pipelines", "finetuning_task", "for_llm_compressor", "id2label",
    "is_llama_config", "label2id", "problem_type", "base_model*", "task_specific_params", "tokenizer_class",
    "_num_labels", "num_labels", "model_name", "quantization_status", "text_config", "license",
    "vision_config",
    # Tokens and generation
    "*_token_id", "*_token_ids", "*_token_index", "bad_words_ids", "begin_suppress_tokens", "suppress_tokens",
    "do_sample", "prefix", "early_stopping", "max_length", "min_length", "max_new_tokens", "num_beam*",
    "num_return_sequences", "temperature", "top_k", "top_p", "*_penalty", "typical_p",
    "*no_repeat_ngram_size", "model_max_length", "seq_length", "max_seq_len", "max_sequence_length",
    # Training
    "*aux_loss*", "*dropout*", "*_pdrop", "*init*_range", "init_*", "initializer_*", "*_init", "*_init_scale",
    "*_init_method*", "gradient_checkpointing*", "layerdrop", "seq_aux", "router_jitter_noise",
    "input_jitter_noise", "router_z_loss*", "z_loss*", "altup_coef_clip", "moe_capacity", "moe_norm_min",
    "initial_context_length", "num_labels", "aux_loss_alpha", "use_recompute",
    # How other software computes the same
    "*attn_implementation", "attention_softmax_in_fp32", "bias_dropout_fusion", "cache_implementation",
    "chunk_size_feed_forward", "ep_size", "flash_attn*", "fuse_*", "masked_softmax_fusion", "output_*",
    "pretraining_tp", "return_dict*", "skip_bias_add", "slow_but_exact", "tensor_parallel_*", "torchscript",
    "use_cache", "use_flash_att*", "*experts_implementation", "block_size",
    # What follows from other fields, or is read only together with them
    "block_*", "conv_dim*", "conv_use_xavier_init", "experts_per_token", "is_decoder", "layer_switch",
    "max_window_layers", "mlp_type", "n_ctx", "n_positions", "norm_type", "offset_alibi",
    "order_of_interleaved_layers", "original_max_position_embeddings", "position_embedding_type",
    "qk_head_dim", "rotary", "rotary_pct", "scale_attn_weights", "theta", "sliding_window_pattern",
    "_sliding_window_pattern", "use_embedding_sharing", "use_gated_activation", "use_parallel_*",
    "use_pos_enc", "vocab_size_per_layer_input", "summary_*", "full_attn_*_factor", "linear_attn_*_factor",
    "mlp_*_factor", "attn_type_list", "layernorm_*_alpha", "layernorm_*_beta", "postnorm",
    # Tokens further ahead are not predicted
    "mtp_*", "num_mtp_modules", "num_nextn_predict_layers", "use_mtp",
)  # fmt: skip
_HARMLESS = re.compile("|".join(HARMLESS).replace("*", ".*"))  # fnmatch.translate's takes twice as long


def model_config(
    fields: dict[str, Any], file: object = "config.json", *, draft_head: bool = False
) -> ModelConfig:
    """A ModelConfig from the content of a config.json.

    Args:
        draft_head: whether model_type is the name of a head that drafts.

    Raises:
        ModelError: a field is missing, invalid or not supported, or contradicts another.
    """
    with malformed(file):
        if not draft_head:
            _check_head(fields)
        model_type = str(fields["model_type"])
        family = DRAFT_HEADS[model_type] if draft_head else supported(model_type)
        hf = _fields(fields, family)
        _check_counts(hf)
        eos, quantization = hf.get("eos_token_id"), quantization_config(hf)
        config = ModelConfig(
            family=model_type,
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
            eos_token_ids=token_ids(eos),
            stored=None if quantization is None else stored_weights(quantization),
            quantized_inputs="" if quantization is None else quantized_inputs(quantization),
            **read(model_type, family, hf),
        )
        check(config)
    if "layer_types" not in hf.seen and hf.get("layer_types") not in (None, _layer_types(config)):
        raise ModelError(f"layer_types must be {model_type}'s own: {_layer_types(config)}", file=file)
    for name, neutral in UNLESS_READ.items():
        if name not in hf.seen and hf.get(name) not in (None, neutral):
            raise ModelError(f"{name} is not supported", file=file)
    text = fields if family.text_part is None else fields.get("text_config", fields)
    warn_of_unknown(hf, text, frozenset(("layer_types", *UNLESS_READ)), file)
    return config


def token_ids(eos: Any) -> tuple[int, ...]:
    """The value of eos_token_id: null, an id or a list of them.

    Raises:
        ModelError: it is none of these.
    """
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int and 0 <= i <= MAX_SIZE for i in ids):
        raise ModelError(f"eos_token_id={eos!r} is neither a token id nor a list of them")
    return tuple(ids)


def _check_head(fields: dict[str, Any]) -> None:
    """Raises ModelError for a classification head, and for a head that drafts."""
    for name in (*(fields.get("architectures") or ()), fields.get("speculators_model_type")):
        if "eagle" in str(name).lower():
            raise ModelError(f"{name} is a head that drafts; name it as the model of speculative_config")
        if str(name).endswith("Classification"):
            raise ModelError(
                f"{name} has a classification head; cross-encoders and other classifiers are not supported"
            )


def _fields(fields: dict[str, Any], family: Family) -> Fields:
    """Fields with defaults. For a model with several parts: the text model's, and the whole model's that it
    lacks.
    """
    part = family.text_part
    if part is None:
        return Fields({**family.defaults, **fields})
    if part.inline and "text_config" not in fields:
        return Fields({**family.defaults, **fields})
    text = {"model_type": part.model_types[0], **fields["text_config"]}
    model_type = text["model_type"]
    if model_type not in part.model_types:
        raise ModelError(
            f"text_config.model_type {model_type!r} is not supported; {', '.join(part.model_types)} are"
        )
    whole = _of_whole(fields, text, part)
    defaults = FAMILIES[model_type].defaults if model_type in FAMILIES else {}
    return Fields({**defaults, **family.defaults, **fields, **text, **whole})


def _of_whole(fields: Mapping[str, Any], text: Mapping[str, Any], part: TextPart) -> dict[str, Any]:
    """Fields that stand at both levels, of which transformers uses the whole model's."""
    names = ("eos_token_id", "dtype", "torch_dtype", "quantization_config", "compression_config")
    whole = {name: fields[name] for name in names if fields.get(name) is not None}
    if {"dtype", "torch_dtype"} & whole.keys():
        whole = {"dtype": None, "torch_dtype": None, **whole}
    if part.tied is not None:
        inner = text.get("tie_word_embeddings")
        default = part.tied
        version = str(fields.get("transformers_version") or "")
        if part.tied_before_5 is not None and version.partition(".")[0] in ("", *"01234"):
            default = part.tied_before_5
        tied = fields.get("tie_word_embeddings", default if inner is None else inner)
        whole["tie_word_embeddings"] = tied or (
            part.inline and inner
        )  # before transformers 5 the latter counted
    return whole


def _check_counts(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if isinstance(value, int) and value > MAX_COUNT and COUNTS.fullmatch(name):
            raise ModelError(f"{name}={value} must be at most {MAX_COUNT}")


def _layer_types(config: ModelConfig) -> list[str]:
    """Layer types, as config.json would list them."""
    return [
        "full_attention" if config.window(i) is None else "sliding_attention"
        for i in range(config.num_layers)
    ]


def warn_of_unknown(hf: Fields, text: Mapping[str, Any], known: frozenset[str], file: object) -> None:
    """Warns of fields that have no effect, except those without a value and those that need none.

    Args:
        hf: the fields, after a family's reader has read its own.
        text: the text model's fields; those of a model's other parts are not looked at.
        known: names that were checked elsewhere.
    """
    unknown = text.keys() - hf.seen - known
    for name in sorted(unknown):
        if text[name] and not _HARMLESS.fullmatch(name):
            _warn(str(file), name, json.dumps(text[name]))


@functools.cache
def _warn(file: str, name: str, value: str) -> None:
    """Warns once for each file and field, since several parts of an engine read the file."""
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    warnings.warn(f"{file}: {name}={shown} is unknown to jengine and has no effect", stacklevel=2)
