"""File descriptors of a server, one for each connection."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from jengine.serving.logs.sparse_log import SparseLog

ENOUGH = 65_536
OTHERS = 200  # descriptors that are no connections of clients: of engines, files, fetched images

log = logging.getLogger("jengine.serving")


def allow_descriptors() -> None:
    """Raises this process's limit as far as it may: shells often set 256 or 1,024, which idle connections
    would use up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections(asked: int, ports: int) -> int:
    """How many connections each port may have, so that the process keeps descriptors for everything else:
    health could not be asked without one.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = asked if soft == resource.RLIM_INFINITY else min(asked, max((soft - OTHERS) // ports, 1))
    if most < asked:
        log.warning("max_connections is %d, not %d: this process may open %d files", most, asked, soft)
    return most


def report_sparsely(loop: asyncio.AbstractEventLoop) -> None:
    """Without descriptors, the event loop reports each attempt to accept a connection: thousands a second."""
    write = SparseLog(log.error)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and "accept" in context.get("message", ""):
            write("connections cannot be accepted: %s", error)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
