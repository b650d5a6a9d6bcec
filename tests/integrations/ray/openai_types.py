"""Types of OpenAI's API for Ray Serve LLM, which takes them from vLLM or SGLang. Neither is installed where
tests run; any fields do here.
"""

from __future__ import annotations

import sys
import types

from pydantic import BaseModel, ConfigDict

PLACE = "sglang.srt.entrypoints.openai.protocol"
NAMES = (
    "ChatCompletionRequest", "ChatCompletionResponse", "ChatCompletionStreamResponse", "CompletionRequest",
    "CompletionResponse", "CompletionStreamResponse", "DetokenizeRequest", "DetokenizeResponse",
    "EmbeddingRequest", "EmbeddingResponse", "ScoringRequest", "ScoringResponse", "TokenizeRequest",
    "TokenizeResponse",
)  # fmt: skip


class AnyFields(BaseModel):
    model_config = ConfigDict(extra="allow")


def install() -> None:
    """Lets Ray import them."""
    parts = PLACE.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        sys.modules.setdefault(name, types.ModuleType(name))
    for name in NAMES:
        setattr(sys.modules[PLACE], name, type(name, (AnyFields,), {}))
