"""Sockets that listen, for HTTP."""

from __future__ import annotations

import os
import socket


def listen(host: str, port: int) -> socket.socket:
    """On the first address of this name, as gRPC does on :: for both families. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = family is socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, dualstack_ipv6=both)


def reason(error: OSError) -> str:
    """Without what Python adds about the address; of a name that is not known, the resolver's own words."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)
