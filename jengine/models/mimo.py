"""MiMo: Qwen2's layers, and an MTP head."""

from __future__ import annotations

from typing import Any

from jengine.models.family import Family, Fields
from jengine.models.hf_config import decoder
from jengine.models.llama import Llama
from jengine.models.mtp import Mtp, Names, head_of


class MimoMtp(Mtp):
    """A layer of the model."""

    embedding_first = False

    @staticmethod
    def names(layers: int) -> Names:
        name = "model.mtp_layers.0"
        norms = f"{name}.token_layernorm", f"{name}.hidden_layernorm"
        return Names(f"{name}.", name, *norms, f"{name}.input_proj", f"{name}.final_layernorm")


def read_mimo(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), "qkv_bias": bool(hf.get("attention_bias", True))}


FAMILIES = {"mimo": Family("MiMo", Llama, read_mimo, skipped=("model.mtp_layers.",))}
DRAFT_HEADS = {"mimo_mtp": head_of("MiMo", MimoMtp, FAMILIES["mimo"])}
