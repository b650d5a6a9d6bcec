"""What any command does in a process whose --process-id is not 0: it follows process 0."""

from __future__ import annotations

import argparse

from jengine.commands.flags import engine_fields


def run(options: argparse.Namespace) -> None:
    fields = engine_fields(options)

    from jengine import EngineConfig, follow

    follow(EngineConfig.of(options.model, fields), progress=False)
