"""Methods that LLM and AsyncLLM have for scripts written for vLLM."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.text.tokenizer import Tokenizer
from jengine.vllm.modules import OF_LLM, missing
from jengine.vllm.translate import ENGINE_SETTINGS, translated, warn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VERY_LONG = 10**30  # transformers' model_max_length of a tokenizer without a limit
LEFT_OUT = (
    "disable_log_requests",
    "disable_log_stats",
    "enable_log_requests",
    "start_engine_loop",
    "usage_context",
)


def get_tokenizer(
    tokenizer_name: str, *, revision: str | None = None, **more: Any
) -> PreTrainedTokenizerFast:
    """A model's tokenizer as one of transformers. Downloads the model if its name is a hub id.

    Args:
        more: other arguments of vLLM's function, which must ask for nothing.

    Raises:
        InvalidArgument: an argument that is not supported.
        ModelError: there is no such model, or it has no tokenizer.
    """
    from jengine.checkpoints import resolve
    from jengine.hub.files import TOKENIZER_FILES

    _, notes = translated(more, (), ENGINE_SETTINGS, "argument")
    warn(notes)
    tokenizer = Tokenizer.load(resolve(tokenizer_name, revision, TOKENIZER_FILES))
    return tokenizer.for_transformers(tokenizer_name, VERY_LONG)


def _no_such_attribute(self: object, name: str) -> Any:
    raise AttributeError(missing(type(self).__name__, name, OF_LLM))


class VllmMethods(ABC):
    """The part of LLM and AsyncLLM that only vLLM's users need."""

    tokenizer: Tokenizer
    model: str = ""
    _default_params: SamplingParams
    _tokenizer_of_transformers: PreTrainedTokenizerFast | None = None

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Tokens a sequence may have, prompt and output together."""

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that pass none: the model's generation_config.json, unless
        generation_config is "vllm".

        SamplingParams that a request passes are used unchanged, without these defaults.
        """
        return self._default_params

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

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer as one of transformers. The first call takes seconds to import it."""
        if self._tokenizer_of_transformers is None:
            name, length = self.model, self.max_model_len
            self._tokenizer_of_transformers = self.tokenizer.for_transformers(name, length)
        return self._tokenizer_of_transformers

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute
        __getattr__ = _no_such_attribute
