"""A plan as plain data that can be displayed as text and in notebooks."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from jengine.base.display import columns, columns_html, counted
from jengine.capacity.planning.layouts import Candidate, Choice, Deployment
from jengine.capacity.planning.memory import GIB, Fitting, fits
from jengine.capacity.planning.roofline import NAMES, Batch, Causes, Roofline
from jengine.devices.device_spec import DeviceSpec
from jengine.execution.kernels import described, fastest_formats
from jengine.execution.kinds import Key
from jengine.execution.memory import DeviceMemory, ProgramMemory
from jengine.execution.spec import ExecutionSpec
from jengine.insight.recording.cost_report import cost_report
from jengine.scheduling.costs.step_costs import StepCosts
from pallas_kernels.targets import Choice as Implementation

SHOWN = 10  # layouts in the table
WIDTH = 110
HEAD = (
    "layout",
    "cache GiB",
    "fit",
    "run",
    "ms/token",
    "first ms",
    "tokens/s/device",
    "decode ms",
    "prefill tokens/s",
    "waits most for",
)


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of one kind of step.

    Attributes:
        count: decoding sequences, or tokens of a prefill step.
        context: tokens of each sequence or prompt.
        causes: seconds of a step, by what it waits for.
        fits: whether the cache can hold them.
    """

    count: int
    context: int
    causes: Causes
    fits: bool = True

    @property
    def seconds(self) -> float:
        return sum(self.causes.values())

    @property
    def tokens_per_second(self) -> float:
        return self.count / self.seconds

    @property
    def limit(self) -> str:
        """What the step waits for most."""
        return NAMES[max(self.causes, key=lambda cause: self.causes[cause])]


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The output of `jengine plan`.

    Attributes:
        pages: number of pages in the cache, the null page included; 0 if there is no room.
        total_programs: number of programs in the whole table.
        decode, prefill: speeds of one engine.
        programs: memory of the largest programs, reported by XLA if they were compiled, otherwise an upper
            bound.
        seconds: compilation time of each program; empty if none was compiled.
        kernels: the implementation of each operation.
        fitting: settings with which the model fits, if it does not.
        choice: the layouts that were compared, of which this is the best; None: only one was asked for.
    """

    spec: ExecutionSpec
    roofline: Roofline
    memory: DeviceMemory
    pages: int
    total_programs: int
    decode: list[Rate]
    prefill: list[Rate]
    programs: dict[Key, ProgramMemory]
    kernels: dict[str, Implementation]
    seconds: dict[Key, float] = field(default_factory=dict)
    fitting: list[Fitting] = field(default_factory=list)
    choice: Choice | None = None

    @property
    def device(self) -> DeviceSpec:
        return self.roofline.cluster.device

    @property
    def fits(self) -> bool:
        """Whether the model fits and, if layouts were compared, one of them meets the targets."""
        return self.pages > 0

    def sequences(self, context: int) -> float:
        """Number of sequences of `context` tokens that the cache of each data rank can hold."""
        return max(self.pages - 1, 0) / self.spec.most_pages(context)

    def __repr__(self) -> str:
        return f"Plan({setting(self)}; {self.pages:,} pages, {'fits' if self.fits else 'does not fit'})"

    def _repr_html_(self) -> str:
        shown = "".join(columns_html([table.title, *table.head], table.rows) for table in tables(self))
        lines = "<br>".join(map(escape, verdict(self)))
        return f"<div><p>{escape(setting(self))}</p>{shown}<p>{lines}</p></div>"


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
    layouts = [] if plan.choice is None else [_layouts(plan.choice)]
    shown = [_text(*table) for table in tables(plan)]
    return "\n\n".join([f"{name} on {setting(plan)}", *layouts, *shown, "\n".join(verdict(plan))])


def local_report(
    name: str, spec: ExecutionSpec, memory: DeviceMemory, pages: int, costs: StepCosts | None
) -> str:
    """An engine's memory on this machine, and its step costs as tables for a terminal.

    Args:
        costs: measured by engines with the same options; None: there are none.
    """
    device, dtype = spec.mesh.local_devices[0], spec.model.quantized or str(spec.model.dtype)
    limit = "of this machine, or its container" if device.platform == "cpu" else "that jengine may use"
    table = memory_table(spec, memory, pages, "an upper bound", limit)
    measured = (
        "No engine with these options has measured its steps on this machine. It does so at its first start."
        if costs is None
        else str(cost_report(costs))
    )
    verdict = "It fits." if fits(memory, pages) else "It does not fit."
    advice = fastest_formats(spec)
    parts = [f"{name} on {device.device_kind}: weights {dtype}", _text(*table), measured]
    return "\n\n".join([*parts, *([f"A {advice}."] if advice else []), verdict])


def plain(plan: Plan) -> dict[str, Any]:
    """A dict for JSON."""
    formats, choice = plan.roofline.formats, plan.choice
    cluster = plan.roofline.cluster
    values: dict[str, Any] = {
        "device": plan.device.name,
        "devices": cluster.count,
        "hosts": cluster.hosts,
        "weights": plan.spec.model.quantized or formats.dtype,
        "cache": str(plan.spec.cache_dtype),
        "fits": plan.fits,
        "pages": plan.pages,
        "memory": dataclasses.asdict(plan.memory),
        "decode": [_speed(rate) for rate in plan.decode],
        "prefill": [_speed(rate) for rate in plan.prefill],
        "fitting": [fitting.options for fitting in plan.fitting],
    }
    if choice is not None:
        values |= {
            "traffic": dataclasses.asdict(choice.traffic),
            "verdict": choice.verdict,
            "layouts": [_candidate(choice, candidate) for candidate in choice.candidates],
            "refused": [{**_names(deployment), "why": why} for deployment, why in choice.refused],
        }
    return values


def setting(plan: Plan) -> str:
    """The devices and the number formats."""
    cluster, model, dtype = plan.roofline.cluster, plan.spec.model, plan.roofline.formats.dtype
    wanted = model.unquantized_inputs
    activations = dtype + (f" (not {wanted}, as the checkpoint says)" if wanted else "")
    count = plan.roofline.layout.devices if plan.choice is None else cluster.count
    hosts = f" on {cluster.hosts} hosts" if cluster.hosts > 1 else ""
    return (
        f"{count} x {cluster.device.name}{hosts}: weights {model.quantized or dtype}, activations"
        f" {activations},"
        f" cache {plan.spec.cache_dtype}"
    )


def memory_table(
    spec: ExecutionSpec,
    memory: DeviceMemory,
    pages: int,
    temporaries: str,
    limit: str,
    title: str = "on each device",
) -> Table:
    """The parts of a device's memory.

    Args:
        temporaries, limit: notes on these rows.
    """
    cache = pages * memory.page
    used = memory.beside + memory.margin + cache
    parts = [("weights", memory.weights, "")]
    if spec.adapters is not None:
        note = f"{counted(spec.adapters.places, 'place')} for LoRA of up to rank {spec.adapters.max_rank}"
        parts.append(("adapters", memory.adapters, note))
    parts.append(
        ("KV cache", cache, f"{pages:,} pages of {spec.page_size} tokens, {memory.page:,} bytes each")
    )
    if spec.num_states:
        note = f"{spec.num_states} of {spec.state_bytes:,} bytes each, for sequences and snapshots"
        parts.append(("recurrent states", memory.states, note))
    parts += [
        ("temporaries", memory.working, temporaries),
        ("slots and counts", memory.state, f"for {spec.max_slots} sequences"),
    ]
    if spec.host_pages:
        note = f"{2 * spec.staged} pages in transfer to and from {spec.host_pages:,} host pages"
        parts.append(("staging", memory.staging, note))
    parts += [
        ("margin", memory.margin, "fragmentation"),
        ("free", memory.limit - used, "" if used <= memory.limit else "negative: it does not fit"),
        ("limit", memory.limit, limit),
    ]
    rows = [(part, f"{size / GIB:.2f}", f"{size:,}", note) for part, size, note in parts]
    return Table(title, ("GiB", "bytes", ""), [*rows])


def tables(plan: Plan) -> list[Table]:
    """Memory, sequences, speeds, and compiled programs."""
    spec, device, memory = plan.spec, plan.device, plan.memory
    heaviest = max(plan.programs, key=lambda key: plan.programs[key].working)
    source = "results included" if plan.seconds else "an upper bound; --exact uses the compiler's figure"
    limit = f"{memory.limit / device.memory:.0%} of the device's {device.memory / GIB:.1f} GiB"
    best = None if plan.choice is None else plan.choice.best
    title = "on each device" if best is None else f"{best.deployment}: on each device"
    sections = [memory_table(spec, memory, plan.pages, f"of {heaviest}, {source}", limit, title)]
    if plan.fits:
        lengths = sorted({spec.max_model_len, *(rate.context for rate in plan.decode)})
        held = [(f"of {length:,} tokens", f"{plan.sequences(length):,.1f}") for length in lengths]
        sections.append(Table("sequences that the cache holds", ("",), list(held)))
    sections.append(_speeds("decode, sequences", "context", plan.decode))
    sections += [*_exchanges(plan), _speeds("prefill, tokens a step", "prompts", plan.prefill)]
    if plan.seconds:
        rows = [
            (str(key), f"{plan.seconds[key]:.1f}", f"{used.temporaries:,}")
            for key, used in plan.programs.items()
        ]
        sections.append(Table("compiled for this plan", ("seconds", "bytes of temporaries"), list(rows)))
    return sections


def verdict(plan: Plan) -> tuple[str, ...]:
    """Explains the speeds, and says whether the model fits."""
    table = f"The whole table has {counted(plan.total_programs, 'program')}."
    last = f"{table} {'It fits.' if plan.fits else _does_not_fit(plan)}"
    ahead = ["Programs cannot be compiled for it ahead of time: its first start compiles them."]
    if plan.device.target:
        ahead = []
    return _sources(plan), f"Kernels: {described(plan.kernels)}.", *ahead, last


def _sources(plan: Plan) -> str:
    """Where the speeds come from."""
    device, cluster, formats = plan.device, plan.roofline.cluster, plan.roofline.formats
    rate = device.rates.get(formats.product, device.rates[formats.dtype])
    reached = "on this device" if device.measured else "on an H100 or H200; none was measured on this device"
    links = ""
    if cluster.count > 1:
        kernels = ", except for sums that XLA's kernels take," if _has_kernels(plan) else ""
        network = f", {device.network / 1e9:.0f} GB/s between hosts ({device.network_name})"
        links = (
            f" Collectives take NCCL's latencies{kernels} and {device.link / 1e9:.0f} GB/s in a host"
            f" ({device.link_name}){network if cluster.hosts > 1 else ''}; none was measured."
        )
    return (
        f"Speeds are estimates: {device.bandwidth_share:.1%} of {device.bandwidth / 1e12:.2f} TB/s of memory"
        f" and {device.products_share:.1%} of {rate / 1e12:,.0f} T operations/s in {formats.product}, which"
        f" steps of an 8B in bfloat16 reached {reached}.{links}"
    )


def _does_not_fit(plan: Plan) -> str:
    if plan.choice is not None:
        return plan.choice.verdict
    if not plan.fitting:
        return (
            "It does not fit: neither smaller steps, quantized weights nor up to 8 devices make room for a"
            " cache."
        )
    return f"It does not fit. Fits with {'; or with '.join(map(str, plan.fitting))}."


def _speed(rate: Rate) -> dict[str, Any]:
    return {
        "count": rate.count,
        "context": rate.context,
        "tokens_per_second": rate.tokens_per_second if rate.fits else None,
        "seconds": rate.causes,
    }


def _speeds(title: str, context: str, rates: list[Rate]) -> Table:
    """A row for each count, two columns for each context."""
    contexts = sorted({rate.context for rate in rates})
    head = [cell for length in contexts for cell in (f"{context} {length:,}", "limited by")]
    rows = []
    for count in sorted({rate.count for rate in rates}):
        row = [f"{count:,}"]
        for rate in sorted((rate for rate in rates if rate.count == count), key=lambda rate: rate.context):
            row += (
                [f"{rate.tokens_per_second:,.0f} tokens/s", rate.limit]
                if rate.fits
                else ["-", "no room in the cache"]
            )
        rows.append(tuple(row))
    return Table(title, head, rows)


def _has_kernels(plan: Plan) -> bool:
    cluster = plan.roofline.cluster
    return cluster.has_kernels(cluster.tensor_group(plan.roofline.layout))


def _exchanges(plan: Plan) -> list[Table]:
    """A decode step's time in exchanges between devices, with XLA's kernels for small sums and without."""
    if not (_has_kernels(plan) and plan.decode):
        return []
    roofline, context = plan.roofline, min(rate.context for rate in plan.decode)
    nccl = dataclasses.replace(roofline, cluster=dataclasses.replace(roofline.cluster, kernels=False))

    def row(rate: Rate) -> tuple[str, ...]:
        both = rate.causes, nccl.step(Batch(rate.count, rate.context))
        seconds = *(causes["links"] + causes["latency"] for causes in both), rate.seconds
        return (f"{rate.count:,}", *(f"{1e3 * each:.2f} ms" for each in seconds))

    head = ("exchanges", "with NCCL alone", f"step of context {context:,}")
    return [Table("decode, sequences", head, [row(rate) for rate in plan.decode if rate.context == context])]


def _text(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal. After the first figures, columns without a title or a number are texts."""
    figures = [
        i for i, name in enumerate(head, 1) if i == 1 or (name and any(row[i][:1].isdigit() for row in rows))
    ]
    return columns([title, *head], rows, {*range(len(head) + 1)}.difference(figures))


# --- layouts ------------------------------------------------------------------------------------------


def _layouts(choice: Choice) -> str:
    """The layouts that were compared: what they serve, and why one is the best."""
    serving = [candidate for candidate in choice.candidates if candidate.best]
    lines = [_traffic(choice), ""]
    if serving:
        lines += [columns(HEAD, [_row(candidate) for candidate in serving[:SHOWN]]), ""]
    lines += textwrap.wrap(choice.verdict, WIDTH)
    lines += filter(None, [_start(choice)])
    others = [
        (other.deployment, choice.why(other)) for other in choice.candidates if other is not choice.best
    ]
    if others:
        lines += ["", "Others:", *_reasons(others[: SHOWN - 1])]
        more = len(others) - SHOWN + 1
        lines += [f"  and {counted(more, 'slower layout')}, which --json has"] if more > 0 else []
    if choice.refused:
        lines += ["", "Not possible:", *_reasons(choice.refused)]
    note = (
        "fit, run and prefill are of one engine: the sequences that its cache holds, those that meet the"
        " targets, and"
        " its fastest prefill. cache GiB is of each device, and tokens/s/device counts output tokens."
    )
    return "\n".join([*lines, "", *textwrap.wrap(note, WIDTH)])


def _row(candidate: Candidate) -> tuple[str, ...]:
    point, serving = candidate.best, candidate.serving
    assert point is not None
    total = sum(point.causes.values())
    return (
        str(candidate.deployment),
        f"{candidate.memory.pages * candidate.memory.page / GIB:.1f}",
        f"{serving.fits:,}",
        f"{point.sequences:,}",
        f"{1e3 * point.tpot:.1f}",
        f"{1e3 * point.ttft:,.0f}",
        f"{point.per_device:,.0f}",
        f"{1e3 * serving.decode(point.sequences):.1f}",
        f"{serving.prefill:,.0f}",
        f"{NAMES[point.bound]} {point.causes[point.bound] / total:.0%}",
    )


def _start(choice: Choice) -> str:
    """How to start the best layout, or the best of those that can be started."""
    per_host = choice.cluster.per_host
    possible = [c for c in choice.candidates if c.best and not c.deployment.unavailable(per_host)]
    if not possible or choice.best is None:
        return ""
    unavailable = choice.best.deployment.unavailable(per_host)
    servers = possible[0].deployment.replicas if possible[0].deployment.layout.expert_parallel else 1
    start = f"Start {servers} servers with" if servers > 1 else "Start with"
    prefix = f"jengine does not take {unavailable} yet. The best that it can start:" if unavailable else start
    return f"{prefix} {' '.join(_flags(possible[0]))}"


def _flags(candidate: Candidate) -> list[str]:
    """Options of `jengine serve`."""
    assert candidate.best is not None
    layout, replicas = candidate.deployment.layout, candidate.deployment.replicas
    rows = -(-candidate.best.sequences // layout.data)
    options = candidate.deployment.options | {"max_num_seqs": rows}
    if layout.data > 1:  # limits are those of each rank
        options["max_num_batched_tokens"] = rows + candidate.serving.budget // layout.data
    if replicas > 1 and not layout.expert_parallel:
        options["data_parallel_size"] = replicas
    named = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    return [flag if value is True else f"{flag} {value}" for flag, value in named]


def _reasons(others: list[tuple[Deployment, str]]) -> list[str]:
    return [f"  {deployment}: {why}" for deployment, why in others]


def _traffic(choice: Choice) -> str:
    traffic = choice.traffic
    named = ((traffic.ttft_ms, "to the first token"), (traffic.tpot_ms, "per further token"))
    targets = [f"at most {value:g} ms {what}" for value, what in named if value is not None]
    lengths = f"prompts of {traffic.prompt:,} tokens, outputs of {traffic.output:,}"
    return "; ".join([lengths, *targets])


def _candidate(choice: Choice, candidate: Candidate) -> dict[str, Any]:
    point, serving = candidate.best, candidate.serving
    values: dict[str, Any] = {
        **_names(candidate.deployment),
        "memory": dataclasses.asdict(candidate.memory),
        "sequences": serving.fits,
        "alone_ms": 1e3 * serving.alone.tpot,
        "prefill_tokens_per_second": serving.prefill,
        "point": None,
        "why": None if candidate is choice.best else choice.why(candidate),
    }
    if point is not None:
        startable = not candidate.deployment.unavailable(choice.cluster.per_host)
        values["point"] = dataclasses.asdict(point)
        values["decode_ms"] = 1e3 * serving.decode(point.sequences)
        values["flags"] = _flags(candidate) if startable else None
    return values


def _names(deployment: Deployment) -> dict[str, Any]:
    return {
        "layout": str(deployment),
        **dataclasses.asdict(deployment.layout),
        "replicas": deployment.replicas,
    }
