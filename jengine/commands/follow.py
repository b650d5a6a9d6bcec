"""What a command does in a process whose --process-id is not 0: it follows process 0, which takes the requests."""

from __future__ import annotations

import argparse

from jengine.commands.flags import engine_fields


def follows(options: argparse.Namespace) -> bool:
    """Whether this process is such a one; then process 0 has ended when this returns."""
    if not getattr(options, "process_id", 0):
        return False
    fields = engine_fields(options)

    from jengine import EngineConfig, follow

    follow(EngineConfig.of(options.model, fields), progress=False)
    return True
