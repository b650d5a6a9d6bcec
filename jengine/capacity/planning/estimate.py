"""Estimates a step's duration from the compiled programs: bytes, operations and launches of each kernel.

The estimate depends on `Assumptions`, which have not been confirmed on a GPU. `roofline` gives bounds.
Kernels run one after the other. Each takes its launch plus the slower of its bytes and its operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jengine.capacity.planning.hlo import Array, HloProgram, Instruction
from jengine.devices.device_spec import DeviceSpec
from pallas_kernels.attention.work_list import LEAST, QUERIES, TILE, most_rows
from pallas_kernels.products.groups import out_per_block

Cause = Literal["weights", "cache", "activations", "links", "launches"]
CAUSES: tuple[Cause, ...] = ("weights", "cache", "activations", "links", "launches")
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8", "f8e4m3fn": "float8_e4m3fn"}
SMALL_GROUPS = 1.6  # times the instructions, if groups of 32 or 64 four-bit weights share a scale
OUTPUTS = 128  # of a thread block of a grouped product


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Values that must be measured on a GPU. Until then, typical ones.

    Attributes:
        bandwidth: achieved share of the data sheet's bandwidth if the whole chip is busy.
        products: achieved share of the data sheet's operations.
        block_bandwidth: bytes a second of one thread block with 64 KB in flight, at a latency of 0.8
            microseconds.
        join: seconds by which decode attention ends later because it joins parts.
        fill: seconds of a prefill kernel's first loads and last stores, during which nothing is multiplied.
        kernel: seconds between two kernels of a command buffer.
        launch: seconds to launch a single kernel, or a command buffer, from the host.
        turn: seconds for which a loop iteration waits for the host.
        unpacked: four-bit numbers a second that a multiprocessor multiplies, from a count of the kernel's
            instructions.
        exchange: seconds of a collective of a few bytes.
    """

    bandwidth: float = 0.85
    products: float = 0.7
    block_bandwidth: float = 80e9
    join: float = 2e-6
    fill: float = 3.5e-6
    kernel: float = 1.5e-6
    launch: float = 4e-6
    turn: float = 10e-6
    unpacked: float = 80e9
    exchange: float = 8e-6


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a program.

    Attributes:
        kernels: number of kernels that run; each iteration of a loop counts.
        seconds: by cause.
        moved: bytes of memory traffic, by cause.
        operations: of matrix products.
    """

    kernels: int
    seconds: dict[Cause, float]
    moved: dict[Cause, float]
    operations: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def bytes(self) -> float:
        return sum(self.moved.values())


@dataclass(frozen=True, slots=True)
class Step:
    """Work of a program in a step.

    Attributes:
        rows: without padding.
        context: tokens that each row and each tile attends to.
        together: number of rows of each sequence.
    """

    rows: int
    context: int
    together: int = 1


@dataclass(frozen=True, slots=True)
class _Work:
    cause: Cause
    bytes: float
    operations: float = 0.0
    dtype: str = "bfloat16"
    bandwidth: float = math.inf  # limit of its thread blocks together
    more: float = 0.0  # additional seconds


def estimate(
    program: HloProgram,
    step: Step,
    device: DeviceSpec,
    *,
    launches: int,
    met: float = 0.0,
    devices: int = 1,
    assumed: Assumptions = Assumptions(),  # frozen
) -> Estimate:
    """Estimates the seconds of a program.

    Args:
        launches: the host's launches, see `pallas_kernels.compilation.thunks`.
        met: number of experts that the tokens of a layer use.
        devices: number of devices that share the model.
    """
    seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    bytes_, kernels, operations = seconds.copy(), 0, 0.0
    for one, times, inside in program.kernels():
        work = _work(program, one, inside, step, device, met, devices, assumed)
        rate = device.rates.get(work.dtype, device.rates["bfloat16"]) * assumed.products
        moved = work.bytes / min(device.bandwidth * assumed.bandwidth, work.bandwidth)
        seconds[work.cause] += times * (max(moved, work.operations / rate) + work.more)
        kernels += times
        bytes_[work.cause] += times * work.bytes
        operations += times * work.operations
    alone = _turns(program)
    seconds["launches"] += kernels * assumed.kernel + launches * assumed.launch + alone * assumed.turn
    return Estimate(kernels, seconds, bytes_, operations)


def together(estimates: Iterable[Estimate]) -> Estimate:
    """Sum for programs that run one after the other."""
    all_of = list(estimates)
    return Estimate(
        sum(e.kernels for e in all_of),
        {cause: sum(one.seconds[cause] for one in all_of) for cause in CAUSES},
        {cause: sum(one.moved[cause] for one in all_of) for cause in CAUSES},
        sum(e.operations for e in all_of),
    )


def longer(one: Estimate, two: Estimate, layers: int) -> Estimate:
    """Extrapolates a program with this many layers from the same program with one and with two layers."""

    def grown(a: float, b: float) -> float:
        return a + (layers - 1) * (b - a)

    return Estimate(
        round(grown(one.kernels, two.kernels)),
        {cause: grown(one.seconds[cause], two.seconds[cause]) for cause in CAUSES},
        {cause: grown(one.moved[cause], two.moved[cause]) for cause in CAUSES},
        grown(one.operations, two.operations),
    )


def _turns(program: HloProgram) -> int:
    """Loop iterations outside command buffers."""
    return sum(
        one.trips or 1 for one in program.computations[program.entry].values() if one.opcode == "while"
    )


def _work(
    program: HloProgram,
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
        return _Work(
            "weights",
            size,
            2 * math.sqrt(left.size * right.size * out.size),
            DTYPES.get(left.dtype, "bfloat16"),
        )
    if "mosaic" in one.target:
        kernel = one.source.split("/")[-2]
        return _mosaic(kernel, one, [operand.results[0] for operand in operands], step, device, met, assumed)
    return _Work("activations", program.bytes_of(one, inside))


def _mosaic(
    kernel: str,
    one: Instruction,
    operands: list[Array],
    step: Step,
    device: DeviceSpec,
    met: float,
    assumed: Assumptions,
) -> _Work:
    """Work of one of our kernels, by its name."""
    slots = 2 * device.cores  # thread blocks that run at the same time
    if kernel == "paged_attention_decode":
        return _decode(operands, step, assumed)
    if kernel == "latent_attention_decode":
        return _latent_decode(operands, list(one.results), step, assumed)
    if kernel == "paged_attention_prefill":
        queries = operands[0]
        seen = step.context - queries.shape[1] / 2
        size = queries.shape[0] * step.context * _token_bytes(operands) + 2 * queries.bytes
        return _Work("cache", size, 4.0 * queries.size * seen, DTYPES[queries.dtype], more=assumed.fill)
    if kernel == "kv_write":
        return _Work(
            "cache", 2 * sum(array.bytes for array in operands if array.shape[:1] != operands[0].shape[:1])
        )
    if kernel == "grouped_product":
        x, weight = operands[:2]
        share = _share(met, weight.shape[0])
        read = share * weight.bytes
        scales = (
            sum(array.bytes for array in operands if array.dtype == "f32" and len(array.shape) == 3) * share
        )
        outs = out_per_block(next(array for array in operands if array.dtype == "s32").size, weight.shape[1])
        blocks = max(1.0, share * weight.shape[0]) * (weight.shape[1] // outs)
        drawn = min(blocks, slots) * assumed.block_bandwidth
        return _Work(
            "weights",
            x.bytes + read + scales + one.bytes,
            2.0 * x.size * weight.shape[1],
            DTYPES[x.dtype],
            drawn,
        )
    if kernel == "int4_product":
        return _four_bits(operands, one.results[0], device, met, assumed)
    return _Work("activations", one.bytes + sum(array.bytes for array in operands))


def _decode(operands: list[Array], step: Step, assumed: Assumptions) -> _Work:
    """Of decode attention: each block of threads that has work reads as many tiles. Rows of a sequence read
    its tiles together.
    """
    queries, keys = operands[0], next(array for array in operands[1:] if len(array.shape) == 4)
    tables, _, first, _ = [array for array in operands if array.dtype == "s32"][:4]
    (rows, _), kv_heads, blocks = tables.shape, keys.shape[1], first.shape[0] - 1
    live = min(step.rows, rows)
    group = queries.shape[0] // (rows * kv_heads)
    together = min(step.together, most_rows(group, rows))
    reads = live // step.together * math.ceil(step.together / together)  # of a sequence's pages
    pairs = reads * kv_heads
    tiles = max(1, pairs * math.ceil(step.context / TILE))
    busy = min(max(tiles // LEAST, 1), blocks)
    share = live / rows
    # bytes of parts' results
    cut = (busy - 1 + min(busy - 1, pairs)) * together * 4 * group * queries.shape[1]
    size = reads * step.context * _token_bytes(operands) + 2 * share * queries.bytes + 2 * cut
    drawn = assumed.block_bandwidth * tiles / math.ceil(tiles / busy)
    operations = 4.0 * queries.size * share * step.context
    return _Work("cache", size, operations, DTYPES[queries.dtype], drawn, assumed.join if cut else 0.0)


def _latent_decode(operands: list[Array], results: list[Array], step: Step, assumed: Assumptions) -> _Work:
    """Of latent decode attention: as `_decode`. Blocks of heads read the same tiles, at best from a cache."""
    (queries, pages), (out, parts) = operands[:2], results[:2]
    (rows, heads, key_dim), (_, group, rank) = queries.shape, parts.shape
    blocks = [array for array in operands if array.dtype == "s32"][2].shape[0] - 1
    live, pairs = min(step.rows, rows), min(step.rows, rows) * heads // group
    tiles = max(1, pairs * math.ceil(step.context / TILE))
    busy = min(max(tiles // LEAST, 1), blocks)
    cut = (busy - 1 + min(busy - 1, pairs)) * 4 * group * rank
    size = (
        live * step.context * key_dim * pages.bytes // pages.size
        + live * (queries.bytes + out.bytes) / rows
        + 2 * cut
    )
    operations = 2.0 * QUERIES * pairs * step.context * (key_dim + rank)
    drawn = assumed.block_bandwidth * tiles / math.ceil(tiles / busy)
    return _Work("cache", size, operations, DTYPES[queries.dtype], drawn, assumed.join if cut else 0.0)


def _four_bits(
    operands: list[Array], out: Array, device: DeviceSpec, met: float, assumed: Assumptions
) -> _Work:
    """Work of a product with four-bit weights: each block of rows unpacks them again."""
    x, weight, scale, groups = operands[:4]
    experts, outs, words = weight.shape
    # blocks of rows that read the same weights
    share, rows = _share(met, experts), groups.size if experts == 1 else 1
    read = share * (weight.bytes + sum(array.bytes for array in operands if array.shape == scale.shape))
    blocks = max(rows, share * experts) * -(-outs // OUTPUTS) * out.shape[0]
    unpacked = assumed.unpacked / (1 if 8 * words > 64 * scale.shape[2] else SMALL_GROUPS)
    drawn = min(min(blocks, 2 * device.cores) * assumed.block_bandwidth, device.cores * unpacked / 2 / rows)
    return _Work("weights", x.bytes + read + out.bytes, 2.0 * x.size * outs, DTYPES[x.dtype], drawn)


def _share(met: float, experts: int) -> float:
    """Of a weight that is read: all of a dense one."""
    return min(1.0, met / experts) if experts > 1 else 1.0


def _token_bytes(operands: list[Array]) -> int:
    """Bytes of a token's keys and values, including scales, given operands that contain pages."""
    first = next(i for i, array in enumerate(operands) if i and len(array.shape) == 4)
    pages = operands[first].shape[0]
    cache = [array for array in operands if array.shape[:1] == (pages,) and len(array.shape) in (3, 4)]
    return sum(array.bytes // (pages * operands[first].shape[2]) for array in cache)
