"""Detects use in a forked process."""

from __future__ import annotations

import os

from jengine.errors import JengineError


def check_process(pid: int) -> None:
    """Raises JengineError unless this is the process with this id: threads and devices do not survive os.fork()."""
    if os.getpid() != pid:
        raise JengineError(
            f"this model was loaded in process {pid} and cannot be used in process {os.getpid()}, which was forked from it: "
            'load it after the fork, or start processes with multiprocessing.get_context("spawn")'
        )
