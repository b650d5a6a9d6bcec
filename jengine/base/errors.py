"""All errors that users can see."""

from __future__ import annotations

import copyreg
import re
import reprlib
from typing import Any

# repr would take seconds for a list of millions
_repr = reprlib.Repr(maxlist=80, maxtuple=80, maxdict=80, maxstring=200).repr


SECRET = re.compile(r"(?i)(^|_)(api_?key|hf_token|password)$")  # fields whose values must not be shown


class JengineError(Exception):
    """Base of all errors that jengine raises on purpose."""


class InvalidArgument(JengineError, ValueError):
    """A value that jengine cannot apply. The message names the field, the value and the limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field, self.value, self.limit = _cut(field, 200), value, _cut(limit, 2000)
        super().__init__(f"{self.field}={'...' if SECRET.search(field) else shown(value)}: {self.limit}")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the value as text: the value itself may be impossible to pickle."""
        state = {**self.__dict__, "value": shown(self.value)}
        return copyreg.__newobj__, (type(self), str(self)), state  # type: ignore[attr-defined]

    @classmethod
    def needs_extra(
        cls, field: str, value: object, extra: str, missing: ImportError | None = None
    ) -> InvalidArgument:
        """A value that needs packages of an extra. The message has the command that adds them."""
        return cls(field, value, f"needs pip install 'jengine[{extra}]'{f' ({missing})' if missing else ''}")


class PromptTooLong(InvalidArgument):
    """A prompt with more tokens than the model allows.

    Attributes:
        tokens: the prompt's.
        context: the most tokens of a sequence, prompt and output together.
        or_more: whether `tokens` is a lower bound: a text may be rejected by its length in bytes alone.
    """

    def __init__(
        self, field: str, value: object, limit: str, tokens: int, context: int, or_more: bool = False
    ) -> None:
        super().__init__(field, value, limit)
        self.tokens, self.context, self.or_more = tokens, context, or_more

    @property
    def counts(self) -> tuple[int, int, bool]:
        """(tokens, context, or_more)."""
        return self.tokens, self.context, self.or_more


def shown(value: object) -> str:
    """A value of a client or of a file in a message: at most 80 characters."""
    return _cut(_repr(value), 80)


def _cut(text: str, limit: int) -> str:
    """What a message repeats of a text that a client may choose."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class ModelError(JengineError):
    """A model that cannot be read or is not supported. Names the file, and the tensor if any."""

    def __init__(self, reason: str, *, file: object = None, tensor: str | None = None) -> None:
        self.reason, self.file = _cut(reason, 2000), file
        self.tensor = tensor = None if tensor is None else _cut(tensor, 200)
        where = [str(file)] if file is not None else []
        where += [f"tensor {tensor}"] if tensor is not None else []
        super().__init__(": ".join([*where, self.reason]))


class OutOfMemory(JengineError):
    """The device has no room for the weights, or for the KV cache beside them."""


class EngineDead(JengineError):
    """The engine has stopped, after an internal error or because it was closed. The request has no answer."""
