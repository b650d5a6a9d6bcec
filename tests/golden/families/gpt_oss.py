"""gpt-oss."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import COMMON, YARN, Shapes, attention, decoder, linear

_GPT_OSS = {
    **{
        **COMMON,
        "vocab_size": 96,
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "head_dim": 16,
    },
    **{
        "intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 30,
        "swiglu_limit": 1.5,
    },
    "rope_scaling": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt_oss": _GPT_OSS,
    "gpt_oss_wide_sinks": {
        **_GPT_OSS,
        "sliding_window": 250,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
    },
    "gpt_oss_ties": {**_GPT_OSS, "num_hidden_layers": 2},
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, ffn, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    stacked = {
        "gate_up_proj": (hidden, 2 * ffn),
        "gate_up_proj_bias": (2 * ffn,),
        "down_proj": (ffn, hidden),
        "down_proj_bias": (hidden,),
    }

    def layer(name: str, index: int) -> Shapes:
        found = attention(f"{name}.self_attn", config, bias=True) | linear(
            f"{name}.mlp.router", count, hidden, True
        )
        found |= {f"{name}.mlp.experts.{part}": (count, *shape) for part, shape in stacked.items()}
        return found | {f"{name}.self_attn.sinks": (config["num_attention_heads"],)}

    return decoder(config, layer)
