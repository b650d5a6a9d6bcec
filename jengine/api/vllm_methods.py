"""Methods that LLM and AsyncLLM have for scripts written for vLLM."""

from __future__ import annotations

import atexit
import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

from jengine.api.backend import Backend
from jengine.api.script_tokenizer import ScriptTokenizer
from jengine.base.errors import EngineDead, InvalidArgument
from jengine.core.config import EngineConfig
from jengine.text.tokenizer import Tokenizer
from jengine.vllm.names import OF_LLM, missing

LEFT_OUT = (
    "disable_log_requests",
    "disable_log_stats",
    "enable_log_requests",
    "start_engine_loop",
    "usage_context",
)


def _no_such_attribute(self: object, name: str) -> Any:
    raise AttributeError(missing(type(self).__name__, name, OF_LLM))


class VllmMethods(ABC):
    """The part of LLM and AsyncLLM that only vLLM's users need."""

    tokenizer: Tokenizer
    model: str = ""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Tokens a sequence may have, prompt and output together."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **more: Any) -> Self:
        """Create it with these options.

        Raises:
            InvalidArgument: `more` asks for something, or an option is invalid, as for the constructor.
        """
        for name, value in more.items():
            if value is not None and name not in LEFT_OUT:
                raise InvalidArgument(name, value, "must be left out; options are fields of EngineConfig")
        return cls(**dataclasses.asdict(engine_args))

    def get_tokenizer(self) -> ScriptTokenizer:
        """The model's tokenizer, with the interface of transformers' tokenizers."""
        return ScriptTokenizer(self.tokenizer, self.model, self.max_model_len)

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute
        __getattr__ = _no_such_attribute


class AsyncVllmMethods(VllmMethods):
    """AsyncLLM's."""

    backend: Backend
    _closing: bool

    @abstractmethod
    def _died(self, error: BaseException) -> None:
        """Ends all requests and operations with EngineDead."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine's thread, also from outside the event loop. Running requests fail with EngineDead;
        `close` aborts them.

        Args:
            timeout: accepted as in vLLM, and not used: the thread ends after its current step.
        """
        self._closing = True
        self.backend.quit()
        self._died(EngineDead("it was shut down"))
        atexit.unregister(self.backend.quit)
