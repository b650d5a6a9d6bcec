"""Urgency and owner of a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from jengine.base.errors import InvalidArgument
from jengine.base.options import check_targets, check_text
from jengine.core.request import Request

MAX_CLIENT = 256  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """The urgency and the owner of a request.

    Args:
        priority: with policy="priority", lower runs first.
        ttft_ms, tpot_ms: latency targets of this request, instead of the engine's; see EngineConfig.
        client: with policy="fair", the client whose share of the engine it uses; at most MAX_CLIENT
            characters.

    Raises:
        InvalidArgument: naming the field, the value and the limit.
    """

    priority: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    client: str = ""

    def __post_init__(self) -> None:
        if type(self.priority) is not int:
            raise InvalidArgument("priority", self.priority, "must be a whole number")
        check_targets(self.ttft_ms, self.tpot_ms)
        check_text("client", self.client, 0, MAX_CLIENT)

    def apply(self, requests: Iterable[Request]) -> None:
        """Sets the fields of requests.

        Raises:
            InvalidArgument: targets are given for a beam search.
        """
        for request in requests:
            if request.beams is not None and not (self.ttft_ms is None is self.tpot_ms):
                name, value = ("tpot_ms", self.tpot_ms) if self.ttft_ms is None else ("ttft_ms", self.ttft_ms)
                raise InvalidArgument(
                    name, value, "a beam search has no targets: all of its tokens come at the end"
                )
            request.priority, request.client = self.priority, self.client
            request.ttft_ms, request.tpot_ms = self.ttft_ms, self.tpot_ms


class LevelOptions(TypedDict, total=False):
    """ServiceLevel's fields as keyword arguments, for one prompt."""

    priority: int
    ttft_ms: float | None
    tpot_ms: float | None
    client: str


class BatchLevelOptions(TypedDict, total=False):
    """ServiceLevel's fields for several prompts: one value for all, or one each."""

    priority: int | Sequence[int]
    ttft_ms: float | Sequence[float | None] | None
    tpot_ms: float | Sequence[float | None] | None
    client: str | list[str] | tuple[str, ...]


def levels(count: int, options: BatchLevelOptions) -> list[ServiceLevel]:
    """One level per prompt.

    Raises:
        InvalidArgument: the number of values is neither one nor `count`.
    """
    fields = {
        name: values
        for name, values in options.items()
        if values is not None or name not in BatchLevelOptions.__annotations__
    }
    each = [one_each(name, values, count) for name, values in fields.items()]
    if not fields:
        return [ServiceLevel()] * count
    return [ServiceLevel(**dict(zip(fields, values, strict=True))) for values in zip(*each, strict=True)]


def one_each(name: str, value: Any, count: int) -> Sequence[Any]:
    """One value for each prompt. Raises as `levels`."""
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value] * count
    if len(values) != count:
        raise InvalidArgument(name, len(values), f"must be one, or as many as prompts ({count})")
    return values
