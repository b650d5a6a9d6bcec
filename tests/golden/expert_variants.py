"""Configurations of tiny models of families with experts and caches of their own kinds: see variants.py."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_GPT_OSS = {
    **_BASE,
    "model_type": "gpt_oss",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 30,
    "swiglu_limit": 1.5,
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
        **{"beta_fast": 32.0, "beta_slow": 1.0},
    },
}

EXPERT_VARIANTS: dict[str, dict[str, Any]] = {
    "gpt_oss": _GPT_OSS,
    "gpt_oss_wide_sinks": {**_GPT_OSS, "sliding_window": 250, "num_hidden_layers": 2, "num_key_value_heads": 1},
    "gpt_oss_ties": {**_GPT_OSS, "num_hidden_layers": 2},
}
