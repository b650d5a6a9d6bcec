"""The MTP heads of DeepSeek V3, R1 and Kimi K2, and of GLM-4.5 and later."""

from __future__ import annotations

from jengine.models import deepseek, glm_moe
from jengine.models.mtp import Mtp, Names, head_of


def as_layer(layers: int) -> Names:
    """Tensors of a layer behind the last."""
    name = f"model.layers.{layers}"
    norms, repeated = (f"{name}.enorm", f"{name}.hnorm"), ("embed_tokens", "shared_head.head")
    unread = tuple(f"{name}.{tensor}.weight" for tensor in repeated)
    return Names(f"{name}.", name, *norms, f"{name}.eh_proj", f"{name}.shared_head.norm", unread)


class DeepseekMtp(Mtp, deepseek.Deepseek):
    """A layer with latent attention and experts."""

    feeds_norm = False
    names = staticmethod(as_layer)


class Glm4MoeMtp(Mtp, glm_moe.Glm4Moe):
    """A layer with experts."""

    feeds_norm = False
    names = staticmethod(as_layer)


DRAFT_HEADS = {
    **{
        f"{name}_mtp": head_of("DeepSeek V3 and alike", DeepseekMtp, deepseek.FAMILIES[name])
        for name in ("deepseek_v3", "glm4_moe_lite", "kimi_k2")
    },
    "glm4_moe_mtp": head_of("GLM-4.5 and later", Glm4MoeMtp, glm_moe.FAMILIES["glm4_moe"]),
}
