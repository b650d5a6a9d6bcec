"""What rules take (a period's records and sums) and give: a bottleneck and the option to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from jengine.base.display import columns_html
from jengine.insight.recording.records import STAGES, Machine, RequestRecord, StepRecord
from jengine.insight.recording.trace import Trace
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.step_plan import Work
from jengine.table.program_table import SamplerKey, TrunkKey, Variant


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of lost time.

    Attributes:
        name: what was found, such as "padding".
        share: share of time lost, from 0 to 1. Findings are sorted by it.
        summary: one sentence.
        evidence: figures by description.
        option: the option to change: of EngineConfig, a server or SamplingParams, or something else.
        change: one sentence.
        effect: effect of that change, predicted from costs.
    """

    name: str
    share: float
    summary: str
    evidence: dict[str, str]
    option: str
    change: str
    effect: str

    def __str__(self) -> str:
        facts = "".join(f"    {name}: {value}\n" for name, value in self.evidence.items())
        return (
            f"{self.name}: {self.summary}\n{facts}  change {self.option}: {self.change}\n  predicted:"
            f" {self.effect}"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """An engine's bottlenecks.

    Attributes:
        bound: name of the first finding; otherwise `device`, as it should be, or `idle` if there was little
            to do.
        seconds: total duration of the steps.
        steps: number of steps.
        shares: shares of that time by stage of the loop.
    """

    bound: str
    seconds: float
    steps: int
    shares: dict[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def summary(self) -> str:
        """One sentence, without the findings."""
        if not self.steps:
            return "No steps were recorded."
        spent = ", ".join(f"{stage} {share:.0%}" for stage, share in self.shares.items() if share >= 0.005)
        return f"Bound by {self.bound}. {self.steps} steps took {self.seconds:.2f} s of the loop: {spent}."

    def __str__(self) -> str:
        return "\n\n".join([self.summary, *map(str, self.findings)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = ["bound by", "share", "evidence", "change", "predicted"]
        rows = [
            [
                f.name,
                f"{f.share:.0%}",
                "; ".join(f"{k}: {v}" for k, v in f.evidence.items()),
                f"{f.option}: {f.change}",
                f.effect,
            ]
            for f in self.findings
        ] or [[self.bound, "", f"{self.steps} steps in {self.seconds:.2f} s", "", ""]]
        return columns_html(head, rows)


def ms(seconds: float) -> str:
    """Formats seconds in milliseconds."""
    return f"{1e3 * seconds:.3g} ms"


def percent(share: float) -> str:
    return f"{share:.0%}"


def times(factor: float) -> str:
    """A factor on throughput, in words."""
    return f"{factor:.1f} times the tokens a second"


def duration(seconds: float) -> str:
    """Formats seconds, such as 1.53 s, 20.4 ms or 7 us."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 or not seconds else f"{1e6 * seconds:.3g} us"


SHORTEST = 0.2  # seconds between two samples, for shares of them
LEAST_WORK = 0.05  # share of the period in which threads must have been able to run, for a share of that time
FEWEST = 20  # minimum number of steps for meaningful shares
SHORT_PAGES = 0.1  # share of free pages in the cache, below which pages are short


@dataclass(frozen=True, slots=True)
class Processors:
    """The difference of two samples.

    Attributes:
        left: predicted seconds until all programs are ready; None: not known yet.
        compiling: share of the period in which not all were.
    """

    first: Machine
    last: Machine
    left: float | None
    compiling: float

    @classmethod
    def between(cls, samples: Sequence[Machine], begun: float, ended: float) -> Processors | None:
        """From the last sample before the period to the first after it; None: they are too close."""
        before = [s for s in samples if s.at <= begun] or [*samples[:1]]
        after = [s for s in samples if s.at >= ended] or [*samples[-1:]]
        if not before or after[0].at - before[-1].at < SHORTEST:
            return None
        first, last = before[-1], after[0]
        ready = [s.at for s in samples if s.at >= first.at and s.programs_ready == s.programs]
        until = min([*ready[:1], last.at])
        return cls(first, last, _left(samples), (until - first.at) / (last.at - first.at))

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at

    @property
    def known(self) -> bool:
        """Whether the kernel says how long threads waited."""
        return self.first.ran >= 0.0

    @property
    def queued(self) -> float:
        """Share of the time in which this process's threads could run, for which they had no processor."""
        return self._share("ran", "queued")

    @property
    def loop_queued(self) -> float:
        """Share of the time in which the thread that steps the engine could run, but had no processor."""
        return self._share("loop_ran", "loop_queued")

    @property
    def others(self) -> float:
        """Processors that other processes of usual priority used."""
        return max(self.rate("normal") - self.rate("ran"), 0.0)

    @property
    def low(self) -> float:
        """Processors that work of low priority used, such as compilations."""
        return self.rate("low")

    def rate(self, figure: str) -> float:
        """Growth of a figure, a second; 0: unknown."""
        first, last = getattr(self.first, figure), getattr(self.last, figure)
        return max(float(last - first), 0.0) / self.seconds if first >= 0 else 0.0

    def _share(self, ran: str, queued: str) -> float:
        able = self.rate(ran) + self.rate(queued)
        return self.rate(queued) / able if self.known and able >= LEAST_WORK else 0.0


def _left(samples: Sequence[Machine]) -> float | None:
    """Seconds until all programs are ready, if they go on to become so as they did."""
    first, last = samples[0], samples[-1]
    came = last.programs_ready - first.programs_ready
    missing = last.programs - last.programs_ready
    if not missing:
        return 0.0
    return missing * (last.at - first.at) / came if came > 0 else None


class Window:
    """A trace, with sums. All seconds are of the loop while it had work, without idle time.

    Attributes:
        served: whether the engine runs in a server's process, where it receives requests between two steps.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, self.steps, self.facts = trace, trace.steps, trace.facts
        self.served = trace.readers is not None

    @cached_property
    def costs(self) -> StepCosts:
        """Step costs under usual load."""
        return self.trace.step_costs

    @property
    def enough(self) -> bool:
        """Whether there are enough steps for meaningful shares."""
        return len(self.steps) >= FEWEST and self.busy > 0.0

    # --- seconds --------------------------------------------------------------------------------------

    @cached_property
    def spent(self) -> dict[str, float]:
        """Seconds by stage."""
        return {stage: sum([getattr(step, stage) for step in self.steps]) for stage in STAGES}

    @cached_property
    def busy(self) -> float:
        """Seconds of all stages."""
        return sum(self.spent.values())

    @cached_property
    def device(self) -> float:
        """Seconds of the device: measured if known, otherwise predicted."""
        return sum([step.device or step.predicted for step in self.steps])

    @cached_property
    def paused(self) -> float:
        """Seconds of Python's garbage collector."""
        return self.grown("pause_seconds")

    @cached_property
    def compiled(self) -> float:
        """Seconds of compilations."""
        return self.grown("compile_seconds")

    def grown(self, counter: str) -> float:
        """Increase of a counter of the records."""
        return getattr(self.steps[-1], counter) - getattr(self.steps[0], counter) if self.steps else 0.0

    @cached_property
    def processor(self) -> float:
        """Share of planning time in which the loop's thread had a processor. In all other stages it may wait
        for something."""
        if self.spent["schedule"] > 0.0:
            return sum([step.cpu for step in self.steps]) / self.spent["schedule"]
        return 1.0

    @cached_property
    def processors(self) -> Processors | None:
        """The use of processors; None: unknown."""
        if self.steps:
            return Processors.between(self.trace.machines, self.steps[0].begun, self.steps[-1].ended)
        return None

    @property
    def compiling(self) -> bool:
        """Whether programs were loaded or compiled for most of this time."""
        return self.processors is not None and self.processors.compiling > 0.5

    # --- load -----------------------------------------------------------------------------------------

    @cached_property
    def ended(self) -> list[RequestRecord]:
        """Requests that finished in this period without an abort."""
        return [
            request
            for request in self.trace.requests
            if request.ended and request.reason in ("stop", "length")
        ]

    def share(self, of: list[StepRecord]) -> float:
        """Share of these in all steps."""
        return len(of) / max(len(self.steps), 1)

    @cached_property
    def running(self) -> float:
        """Mean number of running requests."""
        return fmean([step.running for step in self.steps])

    @cached_property
    def full(self) -> list[StepRecord]:
        """Steps with the maximum number of sequences while others waited."""
        return [step for step in self.steps if step.waiting and step.running >= self.facts.max_num_seqs]

    @cached_property
    def short_of_pages(self) -> list[StepRecord]:
        """Steps in which requests waited for pages, although more sequences could run."""
        few = SHORT_PAGES * self.facts.pages
        return [
            s
            for s in self.steps
            if s.waiting and s.running < self.facts.max_num_seqs and s.free + s.cached < few
        ]

    # --- predictions ----------------------------------------------------------------------------------

    def step_seconds(self, rows: int, tiles: int = 0, work: Work | None = None, *, adapted: int = 0) -> float:
        """Seconds of a step with so many rows, tiles and places of adapters; estimated without programs."""
        sampler = SamplerKey(max(rows + tiles, 1), self.variant)
        costs = self.costs
        return (
            costs.base(TrunkKey(rows, tiles, adapted=adapted))
            + costs.base(sampler)
            + costs.slopes.seconds(work or Work())
        )

    @cached_property
    def variant(self) -> Variant:
        """The sampler variant of most steps."""
        return Counter([step.sampler.variant for step in self.steps]).most_common(1)[0][0]

    def decoding(self, rows: int) -> float:
        """Seconds of a step that decodes this many rows, with the mean context of this period."""
        decoded = max(sum([step.rows * step.steps for step in self.steps]), 1)
        context = sum([step.work.context for step in self.steps]) / decoded
        longest = max([step.work.longest for step in self.steps], default=0)
        return self.step_seconds(rows, 0, Work(int(context * rows), longest))
