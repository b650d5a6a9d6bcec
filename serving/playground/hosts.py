"""Which names a browser may know this server by.

Without API keys, a page from elsewhere whose name is made to mean this machine's address (DNS rebinding) would be of the server's own
origin, and could use it. The browser says its domain in `Host`. An address, or a name without a dot, is not a domain that others could own.
"""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

MESSAGE = "open this page by the server's address or a name without a dot: without API keys (--api-keys) domain names are rejected\n"


def is_own(host: str) -> bool:
    """Whether a Host header is an address, or a name without a dot."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and "." not in name.removesuffix(".localhost")
    return True


class OwnHosts:
    """An ASGI application that lets only these requests through to another, and all of the paths that are open.

    Args:
        open_paths: what shows nothing and changes nothing.
    """

    def __init__(self, app: ASGIApp, open_paths: frozenset[str]) -> None:
        self._app, self._open = app, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open and not is_own(Headers(scope=scope).get("host", "")):
            await PlainTextResponse(MESSAGE, 421)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
