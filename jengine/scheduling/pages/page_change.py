"""Changes of what the prefix cache holds, as plain data for whoever watches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from jengine.scheduling.pages.block import Block

Medium = Literal["GPU", "CPU"]  # where a page lies, by vLLM's names, whatever the device is
DEVICE: Medium = "GPU"
HOST: Medium = "CPU"


class PageChange(NamedTuple):
    """A page can be found from now on, or cannot be found any more; or none can.

    Attributes:
        block: whose page it is. Its tokens and its parent never change.
        group: index of the cache group, that of recurrent states last.
    """

    kind: Literal["stored", "removed", "cleared"]
    block: Block | None = None
    group: int = 0
    medium: Medium = DEVICE


Changed = Callable[[PageChange], None]
CLEARED = PageChange("cleared")
