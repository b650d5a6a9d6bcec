"""Listening sockets for HTTP."""

from __future__ import annotations

import os
import socket
from typing import Literal

from jengine import InvalidArgument
from jengine.serving.config import ServerConfig

PortOption = Literal["port", "metrics_port"]


def listen(config: ServerConfig, option: PortOption) -> socket.socket:
    """Listens on the first address of config's host, like gRPC for both families on `::`.

    Args:
        option: the option of config with the port.

    Raises:
        InvalidArgument: the port is in use, or the address does not belong to this machine.
    """
    host, port = config.host, getattr(config, option)
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        both = family is socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, dualstack_ipv6=both)
    except OSError as wrong:
        raise InvalidArgument(option, port, f"cannot listen on {host}: {_reason(wrong)}") from None


def _reason(error: OSError) -> str:
    """The error's text without the address that Python adds; the resolver's text for unknown names."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)
