"""All errors that users can see."""

from __future__ import annotations

import reprlib

_repr = reprlib.Repr(maxlist=80, maxtuple=80, maxdict=80, maxstring=200).repr  # repr would take seconds for a list of millions


class JengineError(Exception):
    """Base of all errors that jengine raises on purpose."""


class InvalidArgument(JengineError, ValueError):
    """A value that jengine cannot apply. The message names the field, the value and the limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field, self.value, self.limit = _cut(field, 200), value, _cut(limit, 2000)
        shown = _repr(value)
        super().__init__(f"{self.field}={_cut(shown, 80)}: {self.limit}")


def _cut(text: str, most: int) -> str:
    """What a message repeats of a text that a client may choose."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


class ModelError(JengineError):
    """A model that cannot be read or is not supported. The message names the file and, if there is one, the tensor."""

    def __init__(self, reason: str, *, file: object = None, tensor: str | None = None) -> None:
        self.reason, self.file, self.tensor = reason, file, tensor
        where = [str(file)] if file is not None else []
        where += [f"tensor {tensor}"] if tensor is not None else []
        super().__init__(": ".join([*where, reason]))


class OutOfMemory(JengineError):
    """The device has no room for the weights, or for the KV cache beside them."""


class EngineDead(JengineError):
    """The engine has stopped, after an internal error or because it was closed. The request has no answer."""
