"""Warns of fields of a config.json that jengine does not know: they have no effect here, and may have one
elsewhere.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from jengine.models.family import Fields

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
_HARMLESS = re.compile("|".join(map(fnmatch.translate, HARMLESS)))


def warn_of_unknown(hf: Fields, text: Mapping[str, Any], known: frozenset[str], file: object) -> None:
    """Warns of fields that have no effect, except those without a value and those that need none.

    Args:
        hf: the fields, after a family's reader has read its own.
        text: the text model's fields; those of a model's other parts are not looked at.
        known: names that were checked elsewhere.
    """
    unknown = text.keys() - hf.seen - known
    for name in sorted(unknown):
        if text[name] and not _HARMLESS.match(name):
            _warn(str(file), name, json.dumps(text[name]))


@functools.cache
def _warn(file: str, name: str, value: str) -> None:
    """Warns once for each file and field, since several parts of an engine read the file."""
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    warnings.warn(f"{file}: {name}={shown} is unknown to jengine and has no effect", stacklevel=2)
