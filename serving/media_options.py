"""The options that say which images a server opens for its clients."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from jengine import InvalidArgument

NAME = "allowed_media_domains"


def read_domains(given: Sequence[str] | str | None) -> tuple[str, ...]:
    """The hosts of allowed_media_domains, in lower case.

    Raises:
        InvalidArgument: one of them is not a host, *.NAME or *.
    """
    if isinstance(given, str):
        try:
            listed = json.loads(given)
        except ValueError:
            listed = given.split(",")
        given = listed if isinstance(listed, list) else [given]
    if not isinstance(given, list | tuple | None):
        raise InvalidArgument(NAME, given, "must be a list of hosts")
    out = []
    for one in given or ():
        host = one.strip().lower().strip("[]") if isinstance(one, str) else ""
        if not re.fullmatch(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]*:[0-9a-f:.]*", host):
            limit = "must be a host such as images.example.com, *.example.com or *, without scheme and port"
            raise InvalidArgument(NAME, one, limit)
        out.append(host)
    return tuple(out)
