"""Costs in the cache's root, by the fingerprint of the programs that they belong to: measured once, refined by every engine."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from jengine.execution.cache_folders import costs_file
from jengine.execution.program_folder import make_private, write_private
from jengine.scheduling.costs import StepCosts
from jengine.table.program_table import ProgramTable

log = logging.getLogger("jengine")


class SavedCosts:
    """A file of costs. It is written whole or not at all; of engines that run at once, the last to write it counts.

    Args:
        root: of the cache.
        fingerprint: ExecutionSpec.fingerprint() of the programs.
    """

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.file = costs_file(root, fingerprint)
        self._saved = b""

    def load(self, table: ProgramTable) -> StepCosts | None:
        """None where there are none, or none that can be read, of this table."""
        with contextlib.suppress(OSError, ValueError):
            data = self.file.read_bytes()
            costs = StepCosts.from_json(data)
            if costs.table == table:
                self._saved = data
                return costs
        return None

    def save(self, costs: StepCosts) -> None:
        """Where they have changed. What cannot be written is logged: the next start measures again."""
        data = costs.to_json()
        if data == self._saved:
            return
        try:
            make_private(self.file.parent)
            write_private(self.file, data)
            self._saved = data
        except OSError as error:
            log.warning("costs of steps could not be saved: %s", error)

    def update(self, costs: StepCosts) -> None:
        """Save what an engine has learned, unless the cache has been removed or cleared meanwhile."""
        if self.file.exists() and costs.measured:
            self.save(costs)
