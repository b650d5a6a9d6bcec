"""Converts a Hugging Face config.json to a ModelConfig, with the reader of its family (`jengine/models`).

A field that affects the model's results, and that the family's reader has not read, is rejected if it is in
UNLESS_READ. Any other that jengine does not know causes a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jengine.base.errors import ModelError
from jengine.checkpoints.config_fields import warn_of_unknown
from jengine.checkpoints.quantization_config import quantization_config, stored_weights
from jengine.models import FAMILIES
from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import check

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


def model_config(
    fields: dict[str, Any], file: object = "config.json", families: Mapping[str, Family] = FAMILIES
) -> ModelConfig:
    """A ModelConfig from the content of a config.json.

    Args:
        families: by model_type.

    Raises:
        ModelError: a field is missing, invalid or not supported, or contradicts another.
    """
    try:
        if families is FAMILIES:
            _check_head(fields)
        family = str(fields["model_type"])
        if family not in families:
            raise ModelError(
                f"model_type {family!r} is not supported; {', '.join(sorted(families))} are", file=file
            )
        hf = _fields(fields, families[family])
        eos, quantization = hf.get("eos_token_id"), quantization_config(hf)
        config = ModelConfig(
            family=family,
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
            stored=None if quantization is None else stored_weights(quantization),
            **families[family].read(hf),
        )
        check(config)
    except KeyError as missing:
        raise ModelError(f"field {missing} is missing", file=file) from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as wrong:
        raise ModelError(f"a field has the wrong type or value: {wrong}", file=file) from None
    except ModelError as refused:
        raise ModelError(refused.reason, file=file) from None
    if "layer_types" not in hf.seen and hf.get("layer_types") not in (None, _layer_types(config)):
        raise ModelError(f"layer_types must be {family}'s own: {_layer_types(config)}", file=file)
    for name, neutral in UNLESS_READ.items():
        if name not in hf.seen and hf.get(name) not in (None, neutral):
            raise ModelError(f"{name} is not supported", file=file)
    text = fields if families[family].text_part is None else fields.get("text_config", fields)
    warn_of_unknown(hf, text, frozenset(("layer_types", *UNLESS_READ)), file)
    return config


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
    ends = {"eos_token_id": fields["eos_token_id"]} if fields.get("eos_token_id") is not None else {}
    own = FAMILIES[model_type].defaults if model_type in FAMILIES else {}
    return Fields({**own, **family.defaults, **fields, **text, **ends})


def _layer_types(config: ModelConfig) -> list[str]:
    """Layer types, as config.json would list them."""
    return [
        "full_attention" if config.window(i) is None else "sliding_attention"
        for i in range(config.num_layers)
    ]
