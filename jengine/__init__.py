"""An LLM inference engine that is fully compiled before the first request.

Importing this costs nothing and changes nothing: names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jengine.async_llm import AsyncLLM
    from jengine.config import EngineConfig
    from jengine.errors import EngineDead, InvalidArgument, JengineError, ModelError, OutOfMemory
    from jengine.llm import LLM
    from jengine.request import CompletionOutput, Logprob, RequestOutput, SamplingParams, StructuredOutputs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineDead",
    "InvalidArgument",
    "JengineError",
    "Logprob",
    "ModelError",
    "OutOfMemory",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_MODULES = {
    "jengine.llm": ("LLM",),
    "jengine.async_llm": ("AsyncLLM",),
    "jengine.config": ("EngineConfig",),
    "jengine.errors": ("EngineDead", "InvalidArgument", "JengineError", "ModelError", "OutOfMemory"),
    "jengine.request": ("CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "StructuredOutputs"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
