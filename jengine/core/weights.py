"""Weights that change while an engine runs: their versions, and how requests are treated meanwhile."""

from __future__ import annotations

from typing import Literal, get_args

from jengine.base.errors import InvalidArgument

Version = int | str
FIRST_VERSION = 0  # of the weights that an engine starts with
MAX_VERSION = 256  # characters
PauseMode = Literal["abort", "wait", "keep"]
Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = get_args(Tag)
PAUSED = "paused"  # stop_reason of requests that a pause has aborted


def next_version(version: Version | None, current: Version) -> Version:
    """The version of new weights: the given one, or the number after the current one.

    Raises:
        InvalidArgument: it is neither a whole number nor text, or is not given and the current one is text.
    """
    if version is None:
        if isinstance(current, int):
            return current + 1
        raise InvalidArgument("version", None, f"must be given: {current!r} has no successor")
    if isinstance(version, bool) or not isinstance(version, int | str):
        raise InvalidArgument("version", version, "must be a whole number or text")
    if isinstance(version, str) and not 0 < len(version) <= MAX_VERSION:
        raise InvalidArgument("version", version, f"must have 1 to {MAX_VERSION} characters")
    if isinstance(version, int) and not -(2**63) <= version < 2**63:
        raise InvalidArgument("version", version, "must have at most 64 bits")
    return version


def check_mode(mode: str) -> None:
    """Raises InvalidArgument unless it is a PauseMode."""
    if mode not in get_args(PauseMode):
        raise InvalidArgument("mode", mode, f"must be one of {', '.join(get_args(PauseMode))}")


def check_tags(tags: tuple[str, ...]) -> None:
    """Raises InvalidArgument unless all of them are Tags."""
    for tag in tags:
        if tag not in TAGS:
            raise InvalidArgument("tags", tag, f"must be of {', '.join(TAGS)}")
