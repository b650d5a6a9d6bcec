"""Step costs in the cache's root folder, by the fingerprint of their programs: measured once, refined by
every engine.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from jengine.execution.cache_folders import costs_file
from jengine.execution.program_folder import make_private, write_private
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.table.program_table import ProgramTable

log = logging.getLogger("jengine")


class CostsFile:
    """A file of costs, written atomically. If several engines run, the last writer wins.

    Args:
        root: the cache's root folder.
        fingerprint: ExecutionSpec.fingerprint() of the programs.
    """

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.file = costs_file(root, fingerprint)
        self._saved = b""

    def load(self, table: ProgramTable) -> StepCosts | None:
        """None if there are no readable costs of this table."""
        with contextlib.suppress(OSError, ValueError):
            data = self.file.read_bytes()
            costs = StepCosts.from_json(data)
            if costs.table == table:
                self._saved = data
                return costs
        return None

    def save(self, costs: StepCosts) -> None:
        """Saves costs if they have changed. A write error is logged; the next start then measures again."""
        data = costs.under_usual_load().to_json()
        if data == self._saved:
            return
        try:
            make_private(self.file.parent)
            write_private(self.file, data)
            self._saved = data
        except OSError as error:
            log.warning("step costs could not be saved: %s", error)

    def update(self, costs: StepCosts) -> None:
        """Saves what an engine has learned, unless the cache has been removed or cleared since it started."""
        if self.file.exists() and costs.measured:
            self.save(costs)
