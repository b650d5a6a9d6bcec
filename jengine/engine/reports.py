"""Figures for reports, which may be missing but never stop the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Reports:
    """Computes figures that no step depends on: loads, predictions, totals, traces and recordings.

    A figure that cannot be computed is missing. It is counted, and its cause is logged once.

    Attributes:
        faults: number of figures that could not be computed; each is a bug or a full disk.
    """

    def __init__(self) -> None:
        self.faults = 0
        self._logged: set[tuple[str, type[Exception]]] = set()

    def figure[T, U](self, name: str, compute: Callable[[], T], otherwise: U) -> T | U:
        """Returns the result of `compute`, or `otherwise` if that raises an exception. Thread-safe."""
        try:
            return compute()
        except Exception as error:
            self.faults += 1
            if (name, type(error)) not in self._logged:
                self._logged.add((name, type(error)))
                log.warning(
                    "the engine continues without its %s, which could not be computed", name, exc_info=True
                )
            return otherwise
