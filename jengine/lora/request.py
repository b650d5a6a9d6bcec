"""The name that scripts import from vLLM's module of the same name."""

from jengine.core.lora import LoRARequest

__all__ = ["LoRARequest"]
