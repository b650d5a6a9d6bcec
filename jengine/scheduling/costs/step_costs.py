"""Predicts what a step costs from its programs and its work, and refines the costs from observed steps."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from jengine.scheduling.costs.host_costs import HostCosts, HostSeconds
from jengine.scheduling.step_plan import NO_WORK, Work
from jengine.table.program_table import (
    SWAPS,
    VARIANTS,
    BurstKey,
    DraftKey,
    EncoderKey,
    ProgramTable,
    SamplerKey,
    TableKey,
    TrunkKey,
)

# Estimates used before anything is measured. Only ratios matter: a step's fixed cost equals that of 50
# tokens.
STEP_SECONDS = 1e-3
TOKEN_SECONDS = 2e-5
SAMPLE_SECONDS = 1e-6  # per greedily sampled row
SAMPLERS = dict(zip(VARIANTS, (1.0, 2.0, 4.0, 6.0), strict=True))  # cost of each variant relative to greedy

FIRST = 5  # the median of this many steps is a program's first cost; later steps refine it
# share of an unexpected deviation that a step adds to its costs, so observations fade after about 1 / GAIN
# steps
GAIN = 0.03
EARLY = 0.5  # the gain is EARLY / steps while a trunk has few steps and this is larger than GAIN
LEAST = 0.01  # minimum share of a step attributed to each of its programs
SETTLED = 0.1  # assumed relative error of a settled cost, where that of an estimate is 1
DRAFT_SHARE = 0.2  # of a trunk's cost: that of one token of the draft model, before it is measured


# window of the median: it follows a change within half as many steps, and tolerates up to half of them as
# outliers
STEPS = 15
CLIP = 3.0  # larger deviations are clipped to this multiple of the spread
SPREAD = 0.05  # initial value, before steps have been observed
LEAST_SPREAD = 0.005
FORGET = 0.02  # decay of the spread per step
FORGET_MEAN = 0.002  # decay of the mean per step
MOST = 1.4  # log of the most that a step may exceed its costs and count in the mean: 4 times


class Slopes(NamedTuple):
    """Seconds per unit of Work. All trunks share them, since all read the same cache."""

    context: float = TOKEN_SECONDS / 5000
    longest: float = 0.0
    attended: float = TOKEN_SECONDS / 5000

    def seconds(self, work: Work) -> float:
        return self.context * work.context + self.longest * work.longest + self.attended * work.attended


class SwapCosts(NamedTuple):
    """Seconds to move SWAPS pages between device and host.

    Attributes:
        spill, fill: device time, between its steps.
        fetch: from host to device, in parallel with steps.
    """

    spill: float = STEP_SECONDS
    fetch: float = STEP_SECONDS
    fill: float = STEP_SECONDS


class Cost(msgspec.Struct):
    """Seconds of one program, without the work that depends on context lengths.

    Attributes:
        steps: number of steps that it was learned from.
        first: durations of the first of these steps, sorted.
    """

    seconds: float
    steps: int = FIRST
    first: list[float] = []

    @property
    def settled(self) -> bool:
        return self.steps >= FIRST

    def note(self, seconds: float) -> None:
        """Records one of the first steps. The lower median is used, so a single slow step has no effect."""
        self.first = sorted([*self.first, seconds])
        self.seconds, self.steps = self.first[(len(self.first) - 1) // 2], self.steps + 1


class SavedCosts(msgspec.Struct):
    """Costs as saved. Keys are the names of the table's programs."""

    table: ProgramTable
    programs: dict[str, Cost]
    slopes: Slopes
    spread: float
    host: HostCosts
    swaps: SwapCosts | None = None


class StepCosts:
    """Predicts device seconds of steps: a base cost for each trunk, sampler, burst and program that drafts,
    and shared slopes for the work.

    Each cost is measured at warm-up or learned from a few steps, and then refined by every observed step. The
    machine's current load is a separate factor (`drift`), which follows within about ten steps and does not
    change the costs. Programs that have not run yet are estimated from those that have. Only one thread may
    write; others may read.

    Args:
        table: the table of these programs.
        known: seconds of programs alone, without Work.

    Attributes:
        known: costs of programs that have been measured or have run.
    """

    def __init__(
        self, table: ProgramTable, known: Mapping[Any, float] | None = None, *, slopes: Slopes | None = None
    ) -> None:
        self.table = table
        self.known: dict[TableKey, Cost] = {key: Cost(seconds) for key, seconds in (known or {}).items()}
        self.slopes = Slopes() if slopes is None else slopes
        self.host = HostCosts()
        self.swaps: SwapCosts | None = None  # None: not measured; guesses are used
        self._drift = Drift()
        self._estimates: dict[TableKey, float] = {}  # of programs whose cost is unknown
        self._greedy: dict[TrunkKey, SamplerKey] = {}

    @property
    def measured(self) -> bool:
        """Whether any program's cost is known. If not, all costs are guesses."""
        return bool(self.known)

    @property
    def drift(self) -> float:
        """Duration of steps now, relative to their usual duration."""
        return self._drift.factor

    @property
    def longest_step(self) -> float:
        """Predicted seconds of the most expensive known step, with the cheapest sampler and without work."""
        steps = [self.seconds(key) for key, _ in self._of(TrunkKey)]
        steps += [self.added_seconds(key) for key, _ in self._of(BurstKey)]
        return max(steps) + max([self.added_seconds(key) for key, _ in self._of(DraftKey)], default=0.0)

    @property
    def spread(self) -> float:
        """Mean relative deviation of steps from their predictions."""
        return self._drift.spread

    def seconds(self, trunk: TrunkKey, sampler: SamplerKey | None = None, work: Work = NO_WORK) -> float:
        """Predicted device seconds of a step from the end of the last. sampler: None: the cheapest."""
        return self._drift.factor * (
            self.base(trunk) + self.base(sampler or self._cheapest(trunk)) + self.slopes.seconds(work)
        )

    def added_seconds(self, key: DraftKey | EncoderKey | BurstKey, work: Work = NO_WORK) -> float:
        """Predicted device seconds that this program adds to a step, or those of a whole burst."""
        return self._drift.factor * (self.base(key) + self.slopes.seconds(work))

    def base(self, key: TableKey) -> float:
        """Seconds of a program alone, without work, under usual load."""
        known = self.known.get(key)
        return self._estimated(key) if known is None else known.seconds

    def work_seconds(self, work: Work) -> float:
        """Seconds of a step's work alone."""
        return self._drift.factor * self.slopes.seconds(work)

    def swap_seconds(self, spills: int, fills: int) -> float:
        """Device seconds that this many pages add to a step."""
        swaps = self.swaps or SwapCosts()
        return self._drift.factor * (-(-spills // SWAPS) * swaps.spill + -(-fills // SWAPS) * swaps.fill)

    def fetch_seconds(self, pages: int) -> float:
        """Seconds until this many host pages can be read by steps."""
        swaps = self.swaps or SwapCosts()
        return self._drift.factor * -(-pages // SWAPS) * (swaps.fetch + swaps.fill)

    def observe(
        self, trunk: TrunkKey, sampler: SamplerKey, work: Work, seconds: float, draft: DraftKey | None = None
    ) -> None:
        """Records that a step took `seconds` on the device. draft: the program that drafted before it."""
        if seconds <= 0.0:
            return
        usual, attention = seconds / self._drift.factor, self.slopes.seconds(work)
        keys: list[TableKey] = [trunk, sampler] if draft is None else [trunk, sampler, draft]
        predicted = sum([self.base(key) for key in keys]) + attention
        new = [key for key in keys if not self._settled(key)]
        if new:
            self._begin_together(keys, new, usual - attention, LEAST * usual)
            return
        unexpected = self._drift.observe(math.log(seconds / predicted))
        self._refine([self.known[key] for key in keys], work, predicted, unexpected)

    def observe_burst(self, key: BurstKey, work: Work, seconds: float) -> None:
        """Records that a burst took `seconds` on the device."""
        known, attention = self.known.get(key), self.slopes.seconds(work)
        if seconds <= 0.0:
            return
        if known is None or not known.settled:
            usual = seconds / self._drift.factor
            self._begin(key, max(usual - attention, LEAST * usual))
        else:
            unexpected = self._drift.observe(math.log(seconds / (known.seconds + attention)))
            known.seconds *= math.exp(max(GAIN, EARLY / known.steps) * unexpected)
            known.steps += 1

    def host_seconds(self, rows: int, tiles: int = 0) -> HostSeconds:
        """Host seconds of a step with this many rows and tiles."""
        return HostSeconds(self.host.plan.at(rows + tiles), self.host.collect.at(rows + tiles))

    def observe_plan(self, rows: int, tiles: int, seconds: float) -> None:
        self.host.plan.observe(rows + tiles, seconds)

    def observe_collect(self, rows: int, tiles: int, seconds: float) -> None:
        self.host.collect.observe(rows + tiles, seconds)

    def for_table(self, table: ProgramTable) -> StepCosts:
        """Costs for another table on the same machine with the same model: equal shapes keep their costs,
        others are estimated."""
        size, other = self.table.tile_size, table.tile_size
        same: dict[TableKey, Cost] = {}
        for key, cost in self.known.items():
            if not isinstance(key, TrunkKey):
                same[key] = cost
            elif key.tiles * size % other == 0:
                same[TrunkKey(key.rows, key.tiles * size // other, key.pages, key.adapted)] = cost
        costs = StepCosts(table, {key: cost.seconds for key, cost in same.items()}, slopes=self.slopes)
        costs.host, costs.swaps = self.host, self.swaps
        return costs

    def under_usual_load(self) -> StepCosts:
        """A copy whose costs include the mean load of the last hundreds of steps, and not the current one."""
        usual = self._drift.mean
        costs = StepCosts(self.table, slopes=Slopes(*[usual * slope for slope in self.slopes]))
        costs.known = {
            key: Cost(usual * cost.seconds, cost.steps, [usual * seconds for seconds in cost.first])
            for key, cost in [*self.known.items()]
        }
        costs.swaps = None if self.swaps is None else SwapCosts(*[usual * seconds for seconds in self.swaps])
        costs.host = copy.deepcopy(self.host)
        costs._drift.spread = self.spread
        return costs

    def to_json(self) -> bytes:
        """Serializes all costs, except the load, for `from_json`."""
        programs = {str(key): cost for key, cost in [*self.known.items()]}
        return msgspec.json.encode(
            SavedCosts(self.table, programs, self.slopes, self.spread, self.host, self.swaps)
        )

    @classmethod
    def from_json(cls, data: bytes | str) -> StepCosts:
        """Raises ValueError if the data is not valid saved costs."""
        saved = msgspec.json.decode(data, type=SavedCosts)
        costs = cls(saved.table, slopes=saved.slopes)
        costs.known = {
            key: saved.programs[str(key)] for key in saved.table.all_keys() if str(key) in saved.programs
        }
        costs._drift.spread, costs.host, costs.swaps = saved.spread, saved.host, saved.swaps
        return costs

    # --- learning -----------------------------------------------------------------------------------

    def _settled(self, key: TableKey) -> bool:
        known = self.known.get(key)
        return known is not None and known.settled

    def _begin_together(
        self, keys: list[TableKey], new: list[TableKey], seconds: float, least: float
    ) -> None:
        """Records one of the first steps of programs: each takes a share of the step's deviation from the sum
        of costs, by its assumed error. So a new sampler does not take a large trunk's noise.
        """
        costs = {key: self.base(key) for key in keys}
        errors = {key: cost if key in new else SETTLED * cost for key, cost in costs.items()}
        deviation = (seconds - sum(costs.values())) / sum(errors.values())
        for key in new:
            self._begin(key, max(costs[key] + deviation * errors[key], least))

    def _begin(self, key: TableKey, seconds: float) -> None:
        if key not in self.known:
            self.known[key] = Cost(seconds, 0)
        self.known[key].note(seconds)
        self._estimates.clear()

    def _refine(self, programs: list[Cost], work: Work, predicted: float, unexpected: float) -> None:
        """Adjusts each cost by its share of the step. Together they absorb GAIN of the unexpected relative
        deviation, in logarithms: products of (1 + x) would shrink by the squares of the deviations.
        programs: the trunk's first.
        """
        slopes = self.slopes
        working = (
            slopes.context * work.context,
            slopes.longest * work.longest,
            slopes.attended * work.attended,
        )
        squares = sum([part * part for part in (*[cost.seconds for cost in programs], *working)])
        by = max(GAIN, EARLY / programs[0].steps) * unexpected * predicted / squares
        self.slopes = Slopes(
            *[slope * math.exp(by * part) for slope, part in zip(slopes, working, strict=True)]
        )
        for cost in programs:
            cost.seconds *= math.exp(by * cost.seconds)
            cost.steps += 1
        self._estimates.clear()

    # --- estimates ----------------------------------------------------------------------------------

    def _cheapest(self, trunk: TrunkKey) -> SamplerKey:
        if trunk not in self._greedy:
            self._greedy[trunk] = self.table.sampler(trunk, VARIANTS[0])
        return self._greedy[trunk]

    def _estimated(self, key: TableKey) -> float:
        """Seconds of a burst that has not run: the sum of its steps. Of drafts: a share of so many trunks."""
        if isinstance(key, BurstKey):
            return key.steps * (self.base(key.trunk) + self.base(key.sampler))
        if isinstance(key, DraftKey):
            of = TrunkKey(key.rows, 0, key.pages, self.table.kinds_of_trunks[0])
            return key.tokens * DRAFT_SHARE * self.base(of)
        if isinstance(key, EncoderKey):
            return _linear(key.patches)
        seconds = self._estimates.get(key)
        if seconds is None:
            assert isinstance(key, TrunkKey | SamplerKey), f"{key} is not a part of predictions"
            seconds = self._estimate_trunk(key) if isinstance(key, TrunkKey) else self._estimate_sampler(key)
            self._estimates[key] = seconds
        return seconds

    def _estimate_trunk(self, key: TrunkKey) -> float:
        """Interpolates between known trunks with fewer and more tokens; extrapolates through the smallest and
        the largest. Uses trunks with adapters for those with adapters, as far as any are known."""
        trunks = self._of(TrunkKey)
        alike = [trunk for trunk in trunks if trunk[0].adapted == key.adapted]
        alike = alike or [trunk for trunk in trunks if bool(trunk[0].adapted) == bool(key.adapted)] or trunks
        points = sorted((self.table.tokens(known), cost.seconds) for known, cost in alike)
        tokens = self.table.tokens(key)
        if not points:
            return _linear(tokens)
        first, last = points[0], points[-1]
        if tokens <= first[0] or len(points) == 1:
            return first[1] * _linear(tokens) / _linear(first[0])
        if tokens >= last[0]:
            return (
                _on_line(first, last, tokens)
                if last[0] > first[0] and last[1] > first[1]
                else last[1] * _linear(tokens) / _linear(last[0])
            )
        after = next(i for i, point in enumerate(points) if point[0] > tokens)
        return _on_line(points[after - 1], points[after], tokens)

    def _estimate_sampler(self, key: SamplerKey) -> float:
        """Scales the known cost of the most similar sampler."""
        if samplers := dict(self._of(SamplerKey)):
            rank = VARIANTS.index(key.variant)
            like = min(
                samplers,
                key=lambda k: (abs(VARIANTS.index(k.variant) - rank), abs(math.log(k.rows / key.rows)), k),
            )
            return samplers[like].seconds * _sampling(key) / _sampling(like)
        known = {self.table.tokens(trunk): cost.seconds for trunk, cost in self._of(TrunkKey)}
        return _sampling(key) * (sum(known.values()) / sum(map(_linear, known)) if known else 1.0)

    def _of[Key](self, kind: type[Key]) -> list[tuple[Key, Cost]]:
        """Known costs of programs of one kind."""
        return [(key, cost) for key, cost in [*self.known.items()] if isinstance(key, kind)]


def _linear(tokens: int) -> float:
    """Estimated seconds of a trunk, padding included."""
    return STEP_SECONDS + TOKEN_SECONDS * tokens


def _sampling(key: SamplerKey) -> float:
    return SAMPLE_SECONDS * key.rows * SAMPLERS[key.variant]


def _on_line(first: tuple[int, float], second: tuple[int, float], tokens: int) -> float:
    return first[1] + (second[1] - first[1]) * (tokens - first[0]) / (second[0] - first[0])


class Drift:
    """
    Attributes:
        factor: current factor on costs.
        spread: mean relative deviation of steps from their predictions.
        mean: mean duration of steps relative to their costs, under all loads of the last hundreds of steps.
    """

    def __init__(self) -> None:
        self.factor, self.spread, self.mean = 1.0, SPREAD, 1.0
        self._log = 0.0  # log of the factor
        self._bias = 0.0  # mean deviation from the median, which is not 0 if slow steps are rare and far away
        self._recent = deque([0.0] * STEPS, STEPS)

    def observe(self, ratio: float) -> float:
        """Takes log(measured / usual) of a step. Returns the clipped deviation that the factor did not
        predict, minus the mean of these deviations.

        So the sum of what it returns is bounded. Otherwise costs that follow the deviations would grow or
        shrink without end, and the factor would hide it.
        """
        clip = CLIP * self.spread
        unexpected = min(max(ratio - self._log, -clip), clip)
        self.spread = max(self.spread + FORGET * (abs(unexpected) - self.spread), LEAST_SPREAD)
        self._recent.append(ratio)
        self._log = sorted(self._recent)[STEPS // 2]
        self.factor = math.exp(self._log)
        self.mean += FORGET_MEAN * (math.exp(min(ratio, MOST)) - self.mean)
        self._bias += FORGET * (unexpected - self._bias)
        return unexpected - self._bias
