"""Listening sockets for HTTP."""

from __future__ import annotations

import os
import socket


def listen(host: str, port: int) -> socket.socket:
    """Listens on the name's first address, like gRPC for both families on `::`. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = family is socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, dualstack_ipv6=both)


def reason(error: OSError) -> str:
    """The error's text without the address that Python adds; the resolver's text for unknown names."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)
