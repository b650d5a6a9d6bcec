"""An image of a request."""

from __future__ import annotations

from typing import NamedTuple


class NamedImage(NamedTuple):
    """An image with the name of its field, where that is not its place in `messages`.

    Attributes:
        source: a URL, or the bytes of a file.
    """

    source: str | bytes
    field: str
