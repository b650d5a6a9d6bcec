"""Step costs as plain data that can be displayed as a table and, in notebooks, as a plot."""

from __future__ import annotations

import io
from dataclasses import dataclass

from jengine.base.display import columns, columns_html, image_html
from jengine.scheduling.costs.host_costs import HostSeconds
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.step_plan import Work
from jengine.table.program_table import SamplerKey, TrunkKey

CONTEXTS = 0, 1024, 8192  # tokens before each row and each tile
CURVE = [0, 512, 1024, 2048, 4096, 8192]


@dataclass(frozen=True, slots=True)
class TrunkCost:
    """Cost of a trunk.

    Attributes:
        rows, tiles: numbers of decode rows and prompt tiles.
        tokens: tokens of a step, padding included.
        seconds: of a step without a sampler, by the number of tokens before each row and tile.
        steps: number of steps that it was learned from, warm-up included; 0: estimated from other programs.
    """

    program: str
    rows: int
    tiles: int
    tokens: int
    seconds: dict[int, float]
    steps: int


@dataclass(frozen=True, slots=True)
class SamplerCost:
    """Cost of a sampler; see TrunkCost. rows: number of sampled rows."""

    program: str
    rows: int
    variant: str
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class CostReport:
    """Step costs on this machine. A step costs its trunk and its sampler, both multiplied by `drift`.

    Attributes:
        context_seconds: for each token that a decode row attends to.
        longest_seconds: in addition, for each token of the longest row.
        attended_seconds: for each pair of a prompt token and a token that it attends to.
        drift: current duration of steps relative to their usual duration.
        spread: mean relative deviation of steps from their predictions.
        host: host seconds of a step, by its rows and tiles.
    """

    trunks: list[TrunkCost]
    samplers: list[SamplerCost]
    context_seconds: float
    longest_seconds: float
    attended_seconds: float
    drift: float
    spread: float
    host: dict[int, HostSeconds]

    def __str__(self) -> str:
        trunks, samplers = (columns(head, rows) for head, rows in self._tables())
        return f"{trunks}\n\n{samplers}\n\n{self._summary()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = "".join(columns_html(head, rows) for head, rows in self._tables())
        return f"<div>{tables}<p>{self._summary()}</p>{image_html(self.plot, 'seconds of steps')}</div>"

    def plot(self) -> bytes:
        """A PNG: decode steps by context, and prompts by number of tokens. Needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for trunk in [trunk for trunk in self.trunks if not trunk.tiles]:
            base = trunk.seconds[0]
            slope = self.context_seconds * trunk.rows + self.longest_seconds
            left.plot(
                CURVE,
                [1e3 * (base + slope * context) for context in CURVE],
                marker=".",
                label=f"{trunk.rows} rows",
            )
        left.set(xlabel="tokens before each row", ylabel="decode step (ms)", ylim=(0, None))
        for rows in sorted({trunk.rows for trunk in self.trunks if trunk.tiles}):
            points = sorted(
                (trunk.tokens - rows, 1e3 * trunk.seconds[0])
                for trunk in self.trunks
                if trunk.tiles and trunk.rows == rows
            )
            right.plot(*zip(*points, strict=True), marker=".", label=f"beside {rows} rows")
        right.set(xlabel="tokens of prompts", ylabel="step (ms)", ylim=(0, None))
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=90)
        return file.getvalue()

    def _tables(self) -> list[tuple[list[str], list[list[str]]]]:
        trunk_head = ["trunk", "tokens", "ms", *[f"after {context:,}" for context in CONTEXTS[1:]], "steps"]
        trunks = [
            [t.program, f"{t.tokens:,}", *[_ms(t.seconds[context]) for context in CONTEXTS], _steps(t.steps)]
            for t in self.trunks
        ]
        samplers = [[s.program, _ms(s.seconds), _steps(s.steps)] for s in self.samplers]
        return [(trunk_head, trunks), (["sampler", "ms", "steps"], samplers)]

    def _summary(self) -> str:
        rows = max(self.host)
        host = self.host[rows]
        return (
            f"Steps deviate from this by {self.spread:.1%} on average; now they take {self.drift:.2f} times"
            f" as long. The host takes {_ms(host.plan)} ms to plan a step of {rows:,} rows and"
            f" {_ms(host.collect)} ms to collect it."
        )


def cost_report(costs: StepCosts) -> CostReport:
    """Costs of all programs of a table, including estimates."""
    table, slopes = costs.table, costs.slopes
    size = table.tile_size

    def trunk(key: TrunkKey) -> TrunkCost:
        known, base = costs.known.get(key), costs.base(key)
        works = {n: Work(key.rows * n, n if key.rows else 0, key.tiles * size * n) for n in CONTEXTS}
        seconds = {n: base + slopes.seconds(work) for n, work in works.items()}
        return TrunkCost(
            str(key), key.rows, key.tiles, table.tokens(key), seconds, 0 if known is None else known.steps
        )

    def sampler(key: SamplerKey) -> SamplerCost:
        known = costs.known.get(key)
        return SamplerCost(
            str(key), key.rows, key.variant, costs.base(key), 0 if known is None else known.steps
        )

    return CostReport(
        trunks=[trunk(key) for key in table.trunks()],
        samplers=[sampler(key) for key in table.samplers()],
        context_seconds=slopes.context,
        longest_seconds=slopes.longest,
        attended_seconds=slopes.attended,
        drift=costs.drift,
        spread=costs.spread,
        host={rows: costs.host_seconds(rows) for rows in (1, *table.row_buckets)},
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}" if seconds < 1e-2 else f"{1e3 * seconds:,.1f}"


def _steps(steps: int) -> str:
    return f"{steps:,}" if steps else "estimated"
