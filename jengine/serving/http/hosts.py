"""Host names under which browsers may use this server.

Without API keys, an attacker's page whose domain is made to resolve to this machine's address (DNS rebinding)
would have the server's origin, and could use it. The browser sends the domain in `Host`. Addresses and names
without a dot cannot be an attacker's domain.
"""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

MESSAGE = (
    "use the server's address or a name without a dot: without API keys (--api-keys), web pages under domain"
    " names are rejected\n"
)


def is_own(host: str) -> bool:
    """Whether a Host header is an address, or a name without a dot."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and "." not in name.removesuffix(".localhost")
    return True


class OwnHosts:
    """An ASGI application that forwards only these requests, and requests for open paths.

    Args:
        open_paths: paths that show and change nothing.
        pages_only: reject only requests that a browser sends for a web page (with `Origin`), so that other
            clients may use any name.
        origins: pages of these may use any name, too.
    """

    def __init__(
        self,
        app: ASGIApp,
        open_paths: frozenset[str] = frozenset(),
        *,
        pages_only: bool = False,
        origins: frozenset[str] = frozenset(),
    ) -> None:
        self._app, self._open, self._pages_only, self._origins = app, open_paths, pages_only, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"] not in self._open
            and self._is_foreign(Headers(scope=scope))
        ):
            await PlainTextResponse(MESSAGE, 421)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_foreign(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if (self._pages_only and origin is None) or origin in self._origins:
            return False
        return not is_own(headers.get("host", ""))
