"""The MTP heads of Qwen3-Next, Qwen3.5 and Qwen3.6: a layer with gated attention."""

from __future__ import annotations

import dataclasses

from jengine.models import qwen3_next
from jengine.models.family import TextPart
from jengine.models.mtp import Mtp, Names, head_of


class Qwen3NextMtp(Mtp, qwen3_next.Qwen3Next):
    @staticmethod
    def names(layers: int) -> Names:
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return Names("mtp.", "mtp.layers.0", *norms, "mtp.fc", "mtp.norm")


VISION = ("visual.",)
DRAFT_HEADS = {
    f"{name}_mtp": dataclasses.replace(
        head_of("Qwen3-Next, Qwen3.5 and Qwen3.6", Qwen3NextMtp, family),
        text_part=family.text_part and TextPart(family.text_part.model_types, VISION),
    )
    for name, family in qwen3_next.FAMILIES.items()
}
