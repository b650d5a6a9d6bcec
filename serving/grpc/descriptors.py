"""File descriptors of a server, one for each connection."""

from __future__ import annotations

import resource

ENOUGH = 65_536


def allow_descriptors() -> None:
    """Raises this process's limit as far as it may: shells often set 256 or 1,024, which idle connections
    would use up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
