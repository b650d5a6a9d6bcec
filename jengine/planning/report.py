"""A plan: plain data that shows itself, as text and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import NamedTuple

from jengine.devices.device_spec import DeviceSpec
from jengine.display import columns_html
from jengine.execution.memory import DeviceMemory, ProgramMemory
from jengine.execution.programs import Key
from jengine.execution.spec import ExecutionSpec
from jengine.planning.estimate import CAUSES, Assumptions, Estimate
from jengine.planning.roofline import Bound, Formats

GIB = 1 << 30
WAITS = {"memory": "memory bandwidth", "products": "matrix rate", "links": "links"}


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second at most, of one kind of step.

    Attributes:
        count: sequences decoding, or tokens of a prefill step.
        context: tokens of each sequence, or of each prompt.
        fits: whether the cache holds them.
    """

    count: int
    context: int
    bound: Bound
    fits: bool = True

    @property
    def tokens_per_second(self) -> float:
        return self.count / self.bound.seconds


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What `jengine plan` prints.

    Attributes:
        pages: of the cache, the null page included; 0 where there is no room.
        total_programs: of the whole table.
        programs: memory of those that take most, as XLA reports it if they were compiled, else an upper estimate.
        seconds: that each took to compile; empty if none was.
        estimates: of those, for full rows of each of `contexts` tokens.
    """

    spec: ExecutionSpec
    device: DeviceSpec
    formats: Formats
    memory: DeviceMemory
    pages: int
    total_programs: int
    programs: dict[Key, ProgramMemory]
    seconds: dict[Key, float]
    decode: list[Rate]
    prefill: list[Rate]
    contexts: list[int]
    estimates: dict[Key, list[Estimate]]

    @property
    def fits(self) -> bool:
        return self.pages > 0

    def sequences(self, context: int) -> float:
        """Of so many tokens, that the cache holds at once."""
        return max(self.pages - 1, 0) / self.spec.most_pages(context)

    def __repr__(self) -> str:
        return f"Plan({setting(self)}; {self.pages:,} pages, {'fits' if self.fits else 'does not fit'})"

    def _repr_html_(self) -> str:
        return html(self)


class Table(NamedTuple):
    """Figures with a title, which is the head of their first column."""

    title: str
    head: Sequence[str]
    rows: list[tuple[str, ...]]


def report(name: str, plan: Plan) -> str:
    """Tables for a terminal.

    Args:
        name: of the model.
    """
    return "\n\n".join([f"{name} on {setting(plan)}", *[_text(*table) for table in tables(plan)], "\n".join(verdict(plan))])


def setting(plan: Plan) -> str:
    """The devices, and the formats of numbers."""
    weights = plan.spec.model.quantization or plan.formats.dtype
    dtypes = f"weights {weights}, activations {plan.formats.dtype}, cache {plan.spec.cache_dtype}"
    return f"{plan.formats.devices} x {plan.device.name}: {dtypes}"


def tables(plan: Plan) -> list[Table]:
    """Memory, sequences, speeds, and what was compiled."""
    spec, device, memory = plan.spec, plan.device, plan.memory
    largest = max(plan.programs, key=lambda key: plan.programs[key].working)
    how = "results included" if plan.seconds else "at most: an estimate, which --exact replaces by the compiler's figure"
    cache = plan.pages * memory.page
    states = f"{spec.num_states} of {spec.state_bytes:,} bytes each, of sequences and snapshots"
    used = memory.beside + memory.margin + cache
    parts = [
        ("weights", memory.weights, ""),
        ("KV cache", cache, f"{plan.pages:,} pages of {spec.page_size} tokens, {memory.page:,} bytes each"),
        *([("recurrent states", memory.states, states)] if spec.num_states else []),
        ("temporaries", memory.working, f"of {largest}, {how}"),
        ("slots and counts", memory.state, f"of {spec.max_slots} sequences"),
        *(
            [("staging", memory.staging, f"{2 * spec.staged} pages on their way from and to {spec.host_pages:,} of the host")]
            if spec.host_pages
            else []
        ),
        ("margin", memory.margin, "fragmentation"),
        ("free", memory.limit - used, "" if used <= memory.limit else "negative: it does not fit"),
        ("limit", memory.limit, f"{memory.limit / device.memory:.0%} of the device's {device.memory / GIB:.1f} GiB"),
    ]
    sizes = [(part, f"{size / GIB:.2f}", f"{size:,}", note) for part, size, note in parts]
    sections = [Table("on each device", ("GiB", "bytes", ""), [*sizes])]
    if plan.fits:
        lengths = sorted({spec.max_model_len, *(rate.context for rate in plan.decode)})
        held = [(f"of {length:,} tokens", f"{plan.sequences(length):,.1f}") for length in lengths]
        sections.append(Table("sequences that the cache holds", ("",), list(held)))
    sections.append(_speeds("decode, sequences", "context", plan.decode))
    sections.append(_speeds("prefill, tokens a step", "prompts", plan.prefill))
    if plan.seconds:
        rows = [(str(key), f"{plan.seconds[key]:.1f}", f"{used.temporaries:,}") for key, used in plan.programs.items()]
        sections.append(Table("compiled for this plan", ("seconds", "bytes of temporaries"), list(rows)))
        sections.append(_estimates(plan))
    return sections


def verdict(plan: Plan) -> tuple[str, ...]:
    """What the speeds mean, and whether it fits."""
    assumed = ", ".join(f"{name} {value:g}" for name, value in asdict(Assumptions()).items())
    estimates = f"Estimates are of full rows, and were checked on no GPU. They assume (SI units; shares of the data sheet): {assumed}."
    device = plan.device
    links = f", {device.link / 1e9:.0f} GB/s to the other devices ({device.link_name})" if plan.formats.devices > 1 else ""
    rate = device.rates.get(plan.formats.product, device.rates[plan.formats.dtype])
    sources = f"{device.bandwidth / 1e12:.2f} TB/s of memory, {rate / 1e12:,.0f} T operations/s in {plan.formats.product}{links}"
    return (
        f"Speeds are bounds: each resource of the data sheet used fully ({sources}).",
        *([estimates] if plan.estimates else []),
        f"The whole table has {plan.total_programs} programs. {'It fits.' if plan.fits else 'It does not fit.'}",
    )


def html(plan: Plan) -> str:
    """The same for a notebook."""
    shown = "".join(columns_html([table.title, *table.head], table.rows) for table in tables(plan))
    return f"<div><p>{escape(setting(plan))}</p>{shown}<p>{'<br>'.join(map(escape, verdict(plan)))}</p></div>"


def _estimates(plan: Plan) -> Table:
    """Of each program that was compiled: milliseconds at each context, and their causes at the longest."""
    head = ["kernels", *(f"ms at {context:,}" for context in plan.contexts), *CAUSES]
    rows: list[tuple[str, ...]] = []
    for key, estimates in plan.estimates.items():
        last = estimates[-1]
        times = [f"{1e3 * estimate.total:.2f}" for estimate in estimates]
        rows.append((str(key), f"{last.kernels:,}", *times, *(f"{last.seconds[cause] / last.total:.0%}" for cause in CAUSES)))
    return Table("estimates, tokens", head, rows)


def _speeds(title: str, context: str, rates: list[Rate]) -> Table:
    """A row for each count, two columns for each context."""
    contexts = sorted({rate.context for rate in rates})
    head = [cell for length in contexts for cell in (f"{context} {length:,}", "waits for")]
    rows = []
    for count in sorted({rate.count for rate in rates}):
        row = [f"{count:,}"]
        for rate in sorted((rate for rate in rates if rate.count == count), key=lambda rate: rate.context):
            row += [f"{rate.tokens_per_second:,.0f} tokens/s", WAITS[rate.bound.resource]] if rate.fits else ["-", "no room in the cache"]
        rows.append(tuple(row))
    return Table(title, head, rows)


def _text(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of figures aligned on the right, those of words on the left."""
    cells = [(title, *head), *rows]
    columns = [[row[i] for row in cells] for i in range(len(cells[0]))]
    widths = [max(map(len, column)) for column in columns]
    figures = [i > 0 and any(cell[:1].isdigit() for cell in column[1:]) and head[i - 1] != "" for i, column in enumerate(columns)]
    figures[1] = True
    lines = [
        "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, figures, strict=True))
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
