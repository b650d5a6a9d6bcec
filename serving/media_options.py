"""The options that say which images a server opens for its clients."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from jengine import InvalidArgument

NAME = "allowed_media_domains"
# patterns, hosts and IPv4 addresses, IPv6 addresses; the latter two perhaps with a port
FORM = re.compile(
    r"\*|\*(\.[a-z0-9_-]+)+|[a-z0-9_-]+(\.[a-z0-9_-]+)*(:[0-9]{1,5})?"
    r"|[0-9a-f.]*:[0-9a-f.]*:[0-9a-f:.]*|\[[0-9a-f:.]+\](:[0-9]{1,5})?"
)


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
        host = one.strip().lower() if isinstance(one, str) else ""
        if not FORM.fullmatch(host):
            limit = (
                "must be a host such as images.example.com, images.internal:8080, *.example.com or *, without"
                " scheme"
            )
            raise InvalidArgument(NAME, one, limit)
        out.append(host.strip("[]") if host.endswith("]") else host)
    return tuple(out)
