"""Seconds of steps from constant costs, computed once for each program and number of rows."""

from __future__ import annotations

from jengine.scheduling.costs.host_costs import HostSeconds
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.work import Work
from jengine.table.program_table import BurstKey, SamplerKey, TrunkKey


class StepTimes:
    """The predictions of StepCosts under usual load."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._bases: dict[tuple[TrunkKey, SamplerKey], float] = {}
        self._hosts: dict[tuple[int, int], HostSeconds] = {}

    def base(self, trunk: TrunkKey, sampler: SamplerKey) -> float:
        """Device seconds of a step without work."""
        known = self._bases.get((trunk, sampler))
        if known is None:
            known = self._bases[trunk, sampler] = self._costs.base(trunk) + self._costs.base(sampler)
        return known

    def burst(self, key: BurstKey) -> float:
        """Device seconds of a burst without work."""
        return self._costs.base(key)

    def device(self, base: float, work: Work) -> float:
        """Device seconds of a step with these programs."""
        return base + self._costs.slopes.seconds(work)

    def host(self, rows: int, tiles: int) -> HostSeconds:
        known = self._hosts.get((rows, tiles))
        if known is None:
            known = self._hosts[rows, tiles] = self._costs.host_seconds(rows, tiles)
        return known
