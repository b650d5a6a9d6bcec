"""A bottleneck and the option to change, in words and figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from jengine.base.display import columns_html


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of lost time.

    Attributes:
        name: of the rule that found it.
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
