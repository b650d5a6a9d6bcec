"""What bounds an engine, and what to change, in words and figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from jengine.display import columns_html


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that costs time.

    Attributes:
        name: of the rule that found it.
        share: of the time that it costs, from 0 to 1: the larger, the earlier it is named.
        summary: one sentence.
        evidence: figures, by what they are.
        option: to change: an EngineConfig's or a server's option, a field of SamplingParams, or what else.
        change: one sentence.
        effect: of that change, as costs predict it.
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
        return f"{self.name}: {self.summary}\n{facts}  change {self.option}: {self.change}\n  predicted: {self.effect}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What bounded an engine.

    Attributes:
        bound: the first finding's name; else `device`, which is as it should be, or `idle` where there was little to do.
        seconds: that the steps took.
        steps: how many.
        shares: of that time, by stage of the loop.
    """

    bound: str
    seconds: float
    steps: int
    shares: dict[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        if not self.steps:
            return "No steps were recorded."
        spent = ", ".join(f"{stage} {share:.0%}" for stage, share in self.shares.items() if share >= 0.005)
        head = f"Bound by {self.bound}. {self.steps} steps took {self.seconds:.2f} s of the loop: {spent}."
        return "\n\n".join([head, *map(str, self.findings)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = ["bound by", "share", "evidence", "change", "predicted"]
        rows = [
            [f.name, f"{f.share:.0%}", "; ".join(f"{k}: {v}" for k, v in f.evidence.items()), f"{f.option}: {f.change}", f.effect]
            for f in self.findings
        ] or [[self.bound, "", f"{self.steps} steps in {self.seconds:.2f} s", "", ""]]
        return columns_html(head, rows)


def ms(seconds: float) -> str:
    """In milliseconds."""
    return f"{1e3 * seconds:.3g} ms"


def percent(share: float) -> str:
    return f"{share:.0%}"


def times(factor: float) -> str:
    """Of tokens a second."""
    return f"{factor:.1f} times the tokens a second"
