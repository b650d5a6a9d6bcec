"""SmolVLM and Idefics3: a Llama with images, whose encoder is in `vision/smolvlm.py`."""

from __future__ import annotations

from jengine.models.family import Family, TextPart
from jengine.models.llama import Llama, read_llama

TEXT = TextPart(("llama",), ("vision_model.", "connector."), "text_model.")
FAMILIES = {
    "idefics3": Family("Idefics3", Llama, read_llama, text_part=TEXT),
    "smolvlm": Family("SmolVLM, SmolVLM2", Llama, read_llama, text_part=TEXT),
}
