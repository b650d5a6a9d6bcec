"""A plan as plain data that can be displayed as text and in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import NamedTuple

from jengine.base.display import columns_html, counted
from jengine.capacity.planning.estimate import CAUSES, Assumptions, Estimate
from jengine.capacity.planning.fitting import Fitting
from jengine.capacity.planning.roofline import Bound, Formats
from jengine.devices.device_spec import DeviceSpec
from jengine.execution.kernels import described
from jengine.execution.kinds import Key
from jengine.execution.memory import DeviceMemory, ProgramMemory
from jengine.execution.spec import ExecutionSpec
from pallas_kernels.targets import Choice

GIB = 1 << 30
LIMITS = {"memory": "memory bandwidth", "products": "matrix rate", "links": "links"}


@dataclass(frozen=True, slots=True)
class Rate:
    """Maximum tokens a second of one kind of step.

    Attributes:
        count: decoding sequences, or tokens of a prefill step.
        context: tokens of each sequence or prompt.
        fits: whether the cache can hold them.
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
    """The output of `jengine plan`.

    Attributes:
        pages: number of pages in the cache, the null page included; 0 if there is no room.
        total_programs: number of programs in the whole table.
        programs: memory of the largest programs, reported by XLA if they were compiled, otherwise an upper
            bound.
        seconds: compilation time of each program; empty if none was compiled.
        estimates: of the compiled programs, for full rows at each of `contexts` tokens.
        kernels: the implementation of each operation.
        fitting: settings with which the model fits, if it does not.
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
    kernels: dict[str, Choice] = field(default_factory=dict)
    fitting: list[Fitting] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.pages > 0

    def sequences(self, context: int) -> float:
        """Number of sequences of `context` tokens that the cache can hold."""
        return max(self.pages - 1, 0) / self.spec.most_pages(context)

    def __repr__(self) -> str:
        return f"Plan({setting(self)}; {self.pages:,} pages, {'fits' if self.fits else 'does not fit'})"

    def _repr_html_(self) -> str:
        return html(self)


class Table(NamedTuple):
    """Figures with a title, which becomes the header of their first column."""

    title: str
    head: Sequence[str]
    rows: list[tuple[str, ...]]


def report(name: str, plan: Plan) -> str:
    """Formats a plan as tables for a terminal.

    Args:
        name: the model's name.
    """
    return "\n\n".join(
        [f"{name} on {setting(plan)}", *[_text(*table) for table in tables(plan)], "\n".join(verdict(plan))]
    )


def setting(plan: Plan) -> str:
    """The devices and the number formats."""
    weights = plan.spec.model.quantization or plan.formats.dtype
    wanted = plan.spec.model.unquantized_inputs
    activations = plan.formats.dtype + (f" (not {wanted}, as the checkpoint says)" if wanted else "")
    dtypes = f"weights {weights}, activations {activations}, cache {plan.spec.cache_dtype}"
    return f"{plan.formats.devices} x {plan.device.name}: {dtypes}"


def _places(spec: ExecutionSpec) -> str:
    assert spec.adapters is not None
    return f"{counted(spec.adapters.places, 'place')} for LoRA of up to rank {spec.adapters.max_rank}"


def tables(plan: Plan) -> list[Table]:
    """Memory, sequences, speeds, and compiled programs."""
    spec, device, memory = plan.spec, plan.device, plan.memory
    largest = max(plan.programs, key=lambda key: plan.programs[key].working)
    how = "results included" if plan.seconds else "an upper bound; --exact uses the compiler's figure"
    cache = plan.pages * memory.page
    states = f"{spec.num_states} of {spec.state_bytes:,} bytes each, for sequences and snapshots"
    used = memory.beside + memory.margin + cache
    parts = [
        ("weights", memory.weights, ""),
        *([("adapters", memory.adapters, _places(spec))] if spec.adapters is not None else []),
        ("KV cache", cache, f"{plan.pages:,} pages of {spec.page_size} tokens, {memory.page:,} bytes each"),
        *([("recurrent states", memory.states, states)] if spec.num_states else []),
        ("temporaries", memory.working, f"of {largest}, {how}"),
        ("slots and counts", memory.state, f"for {spec.max_slots} sequences"),
        *(
            [
                (
                    "staging",
                    memory.staging,
                    f"{2 * spec.staged} pages in transfer to and from {spec.host_pages:,} host pages",
                )
            ]
            if spec.host_pages
            else []
        ),
        ("margin", memory.margin, "fragmentation"),
        ("free", memory.limit - used, "" if used <= memory.limit else "negative: it does not fit"),
        (
            "limit",
            memory.limit,
            f"{memory.limit / device.memory:.0%} of the device's {device.memory / GIB:.1f} GiB",
        ),
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
        rows = [
            (str(key), f"{plan.seconds[key]:.1f}", f"{used.temporaries:,}")
            for key, used in plan.programs.items()
        ]
        sections.append(Table("compiled for this plan", ("seconds", "bytes of temporaries"), list(rows)))
        sections.append(_estimates(plan))
    return sections


def verdict(plan: Plan) -> tuple[str, ...]:
    """Explains the speeds, and says whether the model fits."""
    assumed = ", ".join(f"{name} {value:g}" for name, value in asdict(Assumptions()).items())
    estimates = (
        "Estimates are for full rows and are unchecked on GPUs. They assume (SI units; shares of the data"
        f" sheet): {assumed}."
    )
    device = plan.device
    links = (
        f", {device.link / 1e9:.0f} GB/s to the other devices ({device.link_name})"
        if plan.formats.devices > 1
        else ""
    )
    rate = device.rates.get(plan.formats.product, device.rates[plan.formats.dtype])
    sources = (
        f"{device.bandwidth / 1e12:.2f} TB/s of memory, {rate / 1e12:,.0f} T operations/s in"
        f" {plan.formats.product}{links}"
    )
    return (
        f"Speeds are bounds: each resource of the data sheet used fully ({sources}).",
        *([estimates] if plan.estimates else []),
        f"Kernels: {described(plan.kernels)}.",
        *(
            []
            if device.target
            else ["Programs cannot be compiled for it ahead of time: its first start compiles them."]
        ),
        (
            f"The whole table has {plan.total_programs} programs."
            f" {'It fits.' if plan.fits else _does_not_fit(plan)}"
        ),
    )


def _does_not_fit(plan: Plan) -> str:
    if not plan.fitting:
        return (
            "It does not fit: neither smaller steps, quantized weights nor up to 8 devices make room for a"
            " cache."
        )
    return f"It does not fit. Fits with {'; or with '.join(map(str, plan.fitting))}."


def html(plan: Plan) -> str:
    """The same tables as HTML, for notebooks."""
    shown = "".join(columns_html([table.title, *table.head], table.rows) for table in tables(plan))
    return f"<div><p>{escape(setting(plan))}</p>{shown}<p>{'<br>'.join(map(escape, verdict(plan)))}</p></div>"


def _estimates(plan: Plan) -> Table:
    """For each compiled program: milliseconds at each context, and their causes at the longest."""
    head = ["kernels", *(f"ms at {context:,}" for context in plan.contexts), *CAUSES]
    rows: list[tuple[str, ...]] = []
    for key, estimates in plan.estimates.items():
        last = estimates[-1]
        times = [f"{1e3 * estimate.total:.2f}" for estimate in estimates]
        rows.append(
            (
                str(key),
                f"{last.kernels:,}",
                *times,
                *(f"{last.seconds[cause] / last.total:.0%}" for cause in CAUSES),
            )
        )
    return Table("estimates, tokens", head, rows)


def _speeds(title: str, context: str, rates: list[Rate]) -> Table:
    """A row for each count, two columns for each context."""
    contexts = sorted({rate.context for rate in rates})
    head = [cell for length in contexts for cell in (f"{context} {length:,}", "limited by")]
    rows = []
    for count in sorted({rate.count for rate in rates}):
        row = [f"{count:,}"]
        for rate in sorted((rate for rate in rates if rate.count == count), key=lambda rate: rate.context):
            row += (
                [f"{rate.tokens_per_second:,.0f} tokens/s", LIMITS[rate.bound.resource]]
                if rate.fits
                else ["-", "no room in the cache"]
            )
        rows.append(tuple(row))
    return Table(title, head, rows)


def _text(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligns columns of figures, left-aligns columns of text."""
    cells = [(title, *head), *rows]
    columns = [[row[i] for row in cells] for i in range(len(cells[0]))]
    widths = [max(map(len, column)) for column in columns]
    figures = [
        i > 0 and any(cell[:1].isdigit() for cell in column[1:]) and head[i - 1] != ""
        for i, column in enumerate(columns)
    ]
    figures[1] = True
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, figures, strict=True)
        )
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
