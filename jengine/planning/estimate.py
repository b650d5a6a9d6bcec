"""How long a step should take, from the compiled programs: the bytes and operations of each kernel, and what launching it takes.

A forecast that rests on `Assumptions`, which no GPU has confirmed yet; `roofline` gives bounds. Kernels run one after the other, and each
takes its launch and the slower of its bytes and its operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jengine.devices.device_spec import DeviceSpec
from jengine.planning.hlo import Array, Instruction, Program

Cause = Literal["weights", "cache", "activations", "links", "launches"]
CAUSES: tuple[Cause, ...] = ("weights", "cache", "activations", "links", "launches")
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8", "f8e4m3fn": "float8_e4m3fn"}
OUTPUTS = 128  # of a block of threads of a grouped product


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What has to be measured on a GPU; until then, what is usual.

    Attributes:
        bandwidth: share of the data sheet's that kernels reach with the whole chip.
        products: share of the data sheet's operations that they reach.
        block_bandwidth: bytes a second of one block of threads that has 64 KB in flight, at 0.8 microseconds of latency.
        empty_block: seconds of a block without work, which loads its query and stores.
        kernel: seconds between the work of two kernels of a command buffer.
        launch: the same of what the host launches alone, and of a command buffer.
        turn: seconds for which a loop's turn waits for the host.
        exchange: seconds of a collective of a few bytes.
    """

    bandwidth: float = 0.85
    products: float = 0.7
    block_bandwidth: float = 80e9
    empty_block: float = 4e-6
    kernel: float = 1.5e-6
    launch: float = 4e-6
    turn: float = 10e-6
    exchange: float = 8e-6


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of a program.

    Attributes:
        kernels: that run, those of loops as often as they do.
        seconds: by cause.
        bytes, operations: of memory, and of matrix products.
    """

    kernels: int
    seconds: dict[Cause, float]
    bytes: float
    operations: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Step:
    """What a step does with a program: rows that are no padding, and tokens that each of them, and each tile, sees."""

    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class _Work:
    cause: Cause
    bytes: float
    operations: float = 0.0
    dtype: str = "bfloat16"
    bandwidth: float = math.inf  # what its blocks of threads can draw
    more: float = 0.0  # seconds


def estimate(
    program: Program,
    step: Step,
    device: DeviceSpec,
    *,
    launches: int,
    met: float = 0.0,
    devices: int = 1,
    assumed: Assumptions = Assumptions(),  # frozen
) -> Estimate:
    """Seconds of a program.

    Args:
        launches: what the host launches for it, see `pallas_kernels.thunks`.
        met: experts that a layer's tokens meet.
        devices: that share the model.
    """
    seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    kernels, bytes_, operations = 0, 0.0, 0.0
    for one, times, inside in program.kernels():
        work = _work(program, one, inside, step, device, met, devices, assumed)
        rate = device.rates.get(work.dtype, device.rates["bfloat16"]) * assumed.products
        moved = work.bytes / min(device.bandwidth * assumed.bandwidth, work.bandwidth)
        seconds[work.cause] += times * (max(moved, work.operations / rate) + work.more)
        kernels += times
        bytes_ += times * work.bytes
        operations += times * work.operations
    alone = _turns(program)
    seconds["launches"] += kernels * assumed.kernel + launches * assumed.launch + alone * assumed.turn
    return Estimate(kernels, seconds, bytes_, operations)


def together(estimates: Iterable[Estimate]) -> Estimate:
    """Of programs that run one after the other."""
    all_of = list(estimates)
    seconds = {cause: sum(one.seconds[cause] for one in all_of) for cause in CAUSES}
    return Estimate(sum(e.kernels for e in all_of), seconds, sum(e.bytes for e in all_of), sum(e.operations for e in all_of))


def longer(one: Estimate, two: Estimate, layers: int) -> Estimate:
    """Of a program of so many layers, from the same with one and with two."""

    def grown(a: float, b: float) -> float:
        return a + (layers - 1) * (b - a)

    seconds = {cause: grown(one.seconds[cause], two.seconds[cause]) for cause in CAUSES}
    return Estimate(round(grown(one.kernels, two.kernels)), seconds, grown(one.bytes, two.bytes), grown(one.operations, two.operations))


def _turns(program: Program) -> int:
    """Turns of loops outside command buffers."""
    return sum(one.trips or 1 for one in program.computations[program.entry].values() if one.opcode == "while")


def _work(
    program: Program,
    one: Instruction,
    inside: dict[str, Instruction],
    step: Step,
    device: DeviceSpec,
    met: float,
    devices: int,
    assumed: Assumptions,
) -> _Work:
    operands = [inside[name] for name in one.operands if name in inside]
    if one.opcode.startswith(COLLECTIVES):
        sent = 2 * (devices - 1) / devices * one.bytes
        return _Work("links", 0.0, more=assumed.exchange + sent / device.link)
    if "cublas" in one.target or one.opcode in ("dot", "ragged-dot"):
        left, right, out = (instruction.results[0] for instruction in (*operands[:2], one))
        size = left.bytes + right.bytes + out.bytes
        return _Work("weights", size, 2 * math.sqrt(left.size * right.size * out.size), DTYPES.get(left.dtype, "bfloat16"))
    if "mosaic" in one.target:
        kernel = one.source.split("/")[-2]
        return _mosaic(kernel, one, [operand.results[0] for operand in operands], step, device, met, assumed)
    return _Work("activations", program.bytes_of(one, inside))


def _mosaic(
    kernel: str, one: Instruction, operands: list[Array], step: Step, device: DeviceSpec, met: float, assumed: Assumptions
) -> _Work:
    """Of a kernel of ours, by its name."""
    slots = 2 * device.cores  # blocks of threads at a time
    if kernel == "paged_attention_decode":
        queries, splits = operands[0], one.results[0].shape[0]
        rows, kv_heads = queries.shape[:2]
        live = min(step.rows, rows)
        size = live * step.context * _token_bytes(operands) + queries.bytes + one.bytes
        products = 4.0 * queries.size * step.context * live / rows
        drawn = min(splits * kv_heads * live, slots) * assumed.block_bandwidth
        idle = splits * kv_heads * (rows - live) / slots * assumed.empty_block
        return _Work("cache", size, products, DTYPES[queries.dtype], drawn, idle)
    if kernel == "paged_attention_prefill":
        queries = operands[0]
        seen = step.context - queries.shape[1] / 2
        size = queries.shape[0] * step.context * _token_bytes(operands) + 2 * queries.bytes
        return _Work("cache", size, 4.0 * queries.size * seen, DTYPES[queries.dtype])
    if kernel == "kv_write":
        return _Work("cache", 2 * sum(array.bytes for array in operands if array.shape[:1] != operands[0].shape[:1]))
    if kernel == "grouped_product":
        x, weight = operands[:2]
        read = min(1.0, met / weight.shape[0]) * weight.bytes
        drawn = min(max(1.0, met) * (weight.shape[1] // OUTPUTS), slots) * assumed.block_bandwidth
        return _Work("weights", x.bytes + read + one.bytes, 2.0 * x.size * weight.shape[1], DTYPES[x.dtype], drawn)
    return _Work("activations", one.bytes + sum(array.bytes for array in operands))


def _token_bytes(operands: list[Array]) -> int:
    """A token's keys and values, with scales if there are any, of operands that pages are among."""
    first = next(i for i, array in enumerate(operands) if i and len(array.shape) == 4)
    pages = operands[first].shape[0]
    cache = [array for array in operands if array.shape[:1] == (pages,) and len(array.shape) in (3, 4)]
    return sum(array.bytes // (pages * operands[first].shape[2]) for array in cache)
