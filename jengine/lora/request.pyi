"""For type checkers: jengine.vllm.modules makes this module."""

from jengine.core.lora import LoRARequest as LoRARequest
