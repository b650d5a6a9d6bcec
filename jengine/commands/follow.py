"""Runs a command in a process whose --process-id is not 0: it follows process 0, which takes the requests."""

from __future__ import annotations

import argparse

from jengine.commands.flags import engine_fields


def follows(options: argparse.Namespace) -> bool:
    """Whether this process follows process 0. If so, process 0 has ended when this returns."""
    if not getattr(options, "process_id", 0):
        return False
    fields = engine_fields(options)

    from jengine import EngineConfig, follow

    follow(EngineConfig.of(options.model, fields), progress=False)
    return True
