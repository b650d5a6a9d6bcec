"""Print what a tile of weights or of a cache costs in the machine code of a GPU's kernels, without the GPU.

JAX_PLATFORMS=cpu python tools/kernel_counts.py [--target NAME] [PART ...]  # with the extra `aot`

PART is of the rows' names. The target is an H100, or one that takes the kernels of Ampere and Blackwell.

Kernels with few rows are bound by the instructions that a multiprocessor issues, and by how long a warpgroup
takes for a tile, rather than by memory. The columns are:

- bytes: of weights and scales, or keys and values, that are read for a tile.
- multiply, copy: instructions that each of a multiprocessor's four schedulers issues for a tile, of the
  warpgroup that multiplies it, and of the warp that copies it, or of the warpgroup that copies and converts
  it. Rare branches are left out.
- waits: how often the first waits for the tensor cores.
- TB/s by issue: the rate of an H100 or B200 if each scheduler issues one of these instructions in each cycle.
- tiles at a time: on which a multiprocessor works.
- ns a tile: how long each may take from its first instruction to its last, if memory shall be busy.

Other GPUs have one column of instructions, of the warp that issues most; and of attention those of warps for
each score of a token with a query, and the rate of products that issue allows.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ampere_attention import AMPERE_CASES, BLACKWELL_CASES
from ampere_products import AMPERE_FORMATS, AMPERE_PRODUCTS
from compiler_report import KernelFacts, kernel_facts
from docs_kernels import MACHINES
from kernel_facts import AMPERE, Case, decode, decode_eight_bits

from jengine.devices.device_spec import device_spec
from pallas_kernels.attention import blackwell
from pallas_kernels.attention.ampere import LATENT_PROMPTS, LATENT_ROWS, shape_of_block
from pallas_kernels.compilation.ahead_of_time import device
from pallas_kernels.mosaic import blackwell as tcgen05
from pallas_kernels.mosaic.ampere import DEPTH
from pallas_kernels.products import weights
from pallas_kernels.products.ampere import MOST_ROWS
from pallas_kernels.products.hopper.grouped_product import FEW, SHARED_ROWS
from pallas_kernels.quantization.formats import FP8, FP8_BY_FP8, INT8, WeightFormat
from pallas_kernels.quantization.int4 import GROUPS, TILE

ROWS_OF_PAIRS = 64  # of a block, at most, in which tiles of MXFP4 are copied in pairs
OUT, SIZE = 4096, 14336  # of the weight: the last of a layer of Llama 8B
PRODUCT, COPY, STORE = r"\b(?:UTC)?[HQI]G?MMA", r"\bUTMALDG", r"\bSTS\.128"
WAIT = r"WARPGROUP\.DEPBAR"
TENSOR_MEMORY = rf"\bLDTM\.x{blackwell.PIECE}|\bUTCHMMA"  # loads of so many columns, and products
LABEL, INSTRUCTION = re.compile(r"^(\.L\w+):"), re.compile(r"/\*[0-9a-f]{4,}\*/\s+(\S.*)")
JUMP = re.compile(r"(@!?U?P\d+ )?BRA(?:\.\S+)?( \S+,)? `\((\.L\w+)\)")  # on conditions, if there are any
END = re.compile(r"(@!?U?P\d+ )?(EXIT|RET|BRX)\b")


class Card(NamedTuple):
    """Multiprocessors, cycles a second of the boost clock, and bytes a second of the memory."""

    target: str
    cores: int
    clock: float
    memory: float


H100, B200 = Card("h100", 132, 1.755e9, 3.35e12), Card("b200", 148, 1.965e9, 8e12)


@dataclass(frozen=True)
class Block:
    """Instructions that follow each other, and the blocks that may come next."""

    code: tuple[str, ...]
    following: tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """A way through a loop, from its first block to the jump back."""

    code: tuple[str, ...] = ()
    length: float = inf

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in self.code)

    @property
    def waits(self) -> int:
        """How often a warpgroup waits for products that it has issued since it last waited."""
        events = [name for line in self.code for name in re.findall(f"{PRODUCT}|{WAIT}", line)]
        return sum("DEPBAR" in after and "MMA" in before for before, after in pairwise(events))


@dataclass(frozen=True)
class Tile:
    """What is counted: in each kernel, the loops that work on its tiles.

    Attributes:
        name: what a tile is.
        bytes: read from memory for a tile.
        products: instructions of a tile that `pattern` finds.
        copies: TMA copies of a tile, by other warps; 0: there is none.
        warps: that copy.
        stores: of 16 bytes in each thread, to shared memory, of a tile that another warpgroup converts.
        pairs: whether each warpgroup that multiplies has another that copies for it.
        pattern: of matrix instructions and others that are in each tile.
        scores, operations: of a tile of attention in the kernels of Ampere and Blackwell.
    """

    name: str
    bytes: int
    products: int
    copies: float
    warps: int = 1
    stores: int = 0
    pairs: bool = False
    pattern: str = PRODUCT
    scores: int = 0
    operations: int = 0


@dataclass(frozen=True)
class Count:
    """What a tile costs: instructions that a scheduler issues for it, and what they allow.

    Attributes:
        products, copies: instructions.
        waits: for the tensor cores.
        chains: tiles that a multiprocessor works on at a time.
    """

    card: Card
    tile: Tile
    products: float
    copies: float
    waits: float
    chains: int

    @property
    def issued(self) -> float:
        """Bytes a second, if only the number of instructions counts."""
        return self.tile.bytes / (self.products + self.copies) * self.card.clock * self.card.cores

    @property
    def time(self) -> float:
        """Seconds that a tile may take."""
        return self.tile.bytes * self.chains * self.card.cores / self.card.memory

    @property
    def row(self) -> str:
        figures = (
            f"{self.tile.name} | {self.tile.bytes} | {self.products:.0f} | {self.copies:.0f} | {self.waits:g}"
        )
        return f"{figures} | {self.issued / 1e12:.1f} | {self.chains} | {self.time * 1e9:.0f} |"


def blocks_of(code: str) -> list[Block]:
    """The flow of a kernel's machine code."""
    pieces, labels = list[list[str]]([[]]), dict[str, int]()
    for line in code.splitlines():
        if label := LABEL.match(line):
            if pieces[-1]:
                pieces.append([])
            labels[label[1]] = len(pieces) - 1
        elif instruction := INSTRUCTION.search(line):
            pieces[-1].append(instruction[1].strip().rstrip(";").strip())
            if JUMP.search(pieces[-1][-1]) or END.search(pieces[-1][-1]):
                pieces.append([])
    # of a wait for a barrier that is not ready, if it is not in place
    slow = {
        i
        for i, (piece, after) in enumerate(pairwise(pieces))
        if any("NANOSLEEP" in line for line in piece) and len(after) == 1 and after[0].startswith("BRA")
    }

    def following(i: int) -> tuple[int, ...]:
        last = pieces[i][-1] if pieces[i] else ""
        jump, end = JUMP.search(last), END.search(last)
        targets = [labels[jump[3]]] if jump else []
        if not (jump or end) or (jump and (jump[1] or jump[2])) or (end and end[1]):
            targets.append(i + 1)
        return tuple(target for target in targets if target < len(pieces) and target not in slow)

    return [Block(tuple(piece), following(i)) for i, piece in enumerate(pieces)]


def loops(blocks: list[Block]) -> Iterable[tuple[int, int, frozenset[int]]]:
    """The first and last block of each loop that can be reached, and all of its blocks."""
    reached, todo = set[int](), [0]
    while todo:
        if (block := todo.pop()) not in reached:
            reached.add(block)
            todo += blocks[block].following
    before = dict[int, set[int]]()
    for block in reached:
        for after in blocks[block].following:
            before.setdefault(after, set()).add(block)
    for last in reached:
        for first in blocks[last].following:
            if first <= last:
                inside, todo = {first}, [last]
                while todo:
                    if (block := todo.pop()) not in inside:
                        inside.add(block)
                        todo += before[block]
                yield first, last, frozenset(inside)


def shortest(blocks: list[Block], loop: tuple[int, int, frozenset[int]], pattern: str, least: int) -> Way:
    """The shortest way through a loop with at least so many instructions of the pattern; none is infinitely
    long.
    """
    first, last, inside = loop

    @cache
    def way(block: int, missing: int) -> Way:
        mine = blocks[block].code
        missing = max(0, missing - sum(bool(re.search(pattern, line)) for line in mine))
        if block == last:
            return Way(mine, len(mine)) if missing == 0 else Way()
        after = [way(b, missing) for b in blocks[block].following if b in inside and b > block]
        best = min(after, key=lambda after: after.length, default=Way())
        return Way(mine + best.code, len(mine) + best.length)

    return way(first, least)


def instructions(blocks: list[Block], pattern: str, each: float) -> tuple[float, float]:
    """Instructions for a tile, of which `each` have the pattern, and waits, in the shortest loop that has so
    many.
    """
    ways = [shortest(blocks, loop, pattern, max(1, round(each))) for loop in loops(blocks)]
    best = min(ways, key=lambda way: way.length, default=Way())
    if best.length == inf:  # the loop is unrolled: from one to the next
        code = [line for block in blocks for line in block.code]
        places = [i for i, line in enumerate(code) if re.search(pattern, line)]
        return (places[-1] - places[0]) / (len(places) - 1) * each, 0
    tiles = best.count(pattern) / each
    return best.length / tiles, best.waits / tiles


def count(facts: KernelFacts, tile: Tile, card: Card = H100) -> Count:
    blocks = blocks_of(facts.code)
    products, waits = instructions(blocks, tile.pattern, tile.products)
    resident = min(facts.blocks(facts.threads), -(-facts.grid // card.cores))
    if not tile.copies:
        return Count(card, tile, products, 0, waits, resident * facts.threads // 128)
    copies, _ = instructions(blocks, STORE if tile.stores else COPY, tile.stores or tile.copies)
    warpgroups = facts.threads // 128
    chains = resident * (warpgroups // 2 if tile.pairs else warpgroups - 1)
    return Count(card, tile, products, copies * tile.warps / 4, waits, chains)


def counted(case: Case, tile: Tile, kernel: str, card: Card = H100) -> Count:
    """Count the kernel of a case whose name contains `kernel`."""
    kernels, _ = kernel_facts(device(card.target), case[0], *case[1])
    return next(count(facts, tile, card) for facts in kernels if kernel in facts.name)


def product(rows: int, form: WeightFormat, card: Card = H100) -> Case:
    """Rows by a dense weight, as an engine multiplies them."""
    weight = weights.abstract(jax.ShapeDtypeStruct((OUT, SIZE), jnp.bfloat16), form)

    def run(x: jax.Array, weight: Any) -> jax.Array:
        kernel: Any = {"impl": "mosaic", "device": device(card.target)}
        return weights.stored(weight).on_gpu(x, jnp.dtype("bfloat16"), **kernel)

    return run, (jax.ShapeDtypeStruct((rows, SIZE), jnp.bfloat16), weight)


def tile_of(rows: int, form: WeightFormat) -> Tile:
    """The tile of a product."""
    if form.bits == 8:
        copies = 1 if form.inputs or rows <= FEW else 2
        return Tile(
            "64 x 64",
            64 * 64 + (4 * 64 * 64 // form.group if form.group else 0),
            products=2 if form.inputs else 4,
            copies=copies if form.inputs or form.group or rows > SHARED_ROWS[2] else copies / 2,
        )
    scales = 4 * 64 * TILE // form.group * (1 + form.offset)
    # of weights, rows, scales and offsets, for two warpgroups and perhaps two tiles
    copies = (3 + form.offset) / (4 if rows <= ROWS_OF_PAIRS else 2)
    return Tile("64 x 128", 64 * TILE // 2 + scales, TILE // DEPTH, copies)


def tile_in_tensor_memory(form: WeightFormat) -> Tile:
    """The tile of a product in Blackwell's kernel."""
    scales = 4 * 128 if form.group else 0
    return Tile("128 x 128", 128 * 128 + scales, 4 if form.inputs else 8, 3 if form.inputs else 2)


def tile_of_mma(rows: int, form: WeightFormat) -> Tile:
    """The tile of a product by `mma.sync`, in Ampere's kernel."""
    scales = 4 * 64 * TILE // form.group * (1 + form.offset) if form.group else 0
    products = TILE // DEPTH * max(1, min(rows, MOST_ROWS) // 8)
    return Tile("64 x 128", 64 * TILE * form.bits // 8 + scales, products, copies=0)


def tile_of_attention(function: Any, arrays: Any) -> Tile:
    """The tile of a case of `ampere_attention`, in Ampere's kernel."""
    q, pages = arrays[:2]
    numbers, rank = getattr(pages, "values", pages), function.keywords.get("rank")
    tokens = 1 if len(q.shape) == 3 else q.shape[1]
    _, kv_heads, _, head_dim = numbers.shape
    step, columns = (
        shape_of_block(tokens * q.shape[-2] // kv_heads, head_dim, numbers is not pages)
        if rank is None
        else LATENT_ROWS
        if tokens == 1
        else LATENT_PROMPTS
    )
    size = step * head_dim * numbers.dtype.itemsize + (4 * step if numbers is not pages else 0)
    # four warps share the tile's products, of 16 rows, 8 columns and DEPTH numbers, of keys and of values
    products = columns // 8 * step // 16 * (head_dim + (rank or head_dim)) // DEPTH // 4
    return Tile(
        f"{step} tokens, {columns} queries",
        size * (1 if rank else 2),
        products,
        copies=0,
        scores=step * columns,
        operations=2 * step * columns * (head_dim + (rank or head_dim)),
    )


def tile_of_prompts(_: Any, arrays: Any) -> Tile:
    """The tile of a prompt's attention, in Blackwell's kernel."""
    pages, tokens = arrays[1], blackwell.BLOCK_K
    numbers = getattr(pages, "values", pages)
    head_dim, scales = numbers.shape[-1], 4 if numbers is not pages else 0
    loaded = (tokens + head_dim) // blackwell.PIECE  # scores, and sums to be scaled
    return Tile(
        f"{tokens} tokens, {tcgen05.ROWS} rows",
        2 * tokens * (head_dim * numbers.dtype.itemsize + scales),
        loaded + (head_dim + tokens) // DEPTH,
        copies=0,
        pattern=TENSOR_MEMORY,
        scores=tcgen05.ROWS * tokens,
        operations=4 * tcgen05.ROWS * tokens * head_dim,
    )


def tiles() -> dict[str, Tile]:
    """Of the cases for Ampere and Blackwell whose kernels have a loop over tiles."""
    products = {
        f"{name}, {rows} rows": tile_of_mma(rows, form)
        for name, form in AMPERE_FORMATS.items()
        for rows in (8, 64)
    }
    attention = {name: case for name, case in AMPERE_CASES.items() if not name.startswith(("write", "copy"))}
    return (
        products
        | {name: tile_of_attention(*case) for name, case in attention.items()}
        | {name: tile_of_prompts(*case) for name, case in BLACKWELL_CASES.items()}
    )


def cases_for(target: str) -> dict[str, Case]:
    """The cases that a target's kernels are compiled for."""
    return AMPERE_PRODUCTS | AMPERE_CASES | (BLACKWELL_CASES if target == "b200" else {})


FP8_GROUPS = WeightFormat(FP8, 8, 128)
FORMATS = {
    "int8": INT8,
    "fp8": WeightFormat(FP8, 8),
    "fp8 x fp8": FP8_BY_FP8,
    "fp8 in groups of 128": FP8_GROUPS,
    "fp8 x fp8, both in groups of 128": replace(FP8_GROUPS, inputs=FP8),
    **{f"int4, groups of {group}": WeightFormat("int4", 4, group) for group in GROUPS},
    **{f"int4, groups of {group}, offsets": WeightFormat("int4", 4, group, offset=True) for group in GROUPS},
    "MXFP4": WeightFormat("e2m1", 4, 32),
}
ROWS = 8, 16, 64, 256
CACHES = {
    "bfloat16": (
        decode(128, 64),
        Tile("64 tokens", 4 * 64 * 128, products=16, copies=2, warps=4, pairs=True),
    ),
    **{
        kind: (
            decode_eight_bits(128, 64, kind),
            Tile("64 tokens", 2 * 64 * (128 + 4), products=16, copies=4, warps=4, stores=16, pairs=True),
        )
        for kind in ("int8", FP8)
    },
}


def every(card: Card = H100) -> Iterator[tuple[str, Callable[[], Count]]]:
    """Names of the table's rows, and what counts them. A process compiles for one card."""
    if card is B200:
        for name in "int8", "fp8", "fp8 in groups of 128", "fp8 x fp8, both in groups of 128":
            for rows in ROWS[1:]:
                form = FORMATS[name]
                case = product(rows, form, B200), tile_in_tensor_memory(form), "product", B200
                yield f"{name}, {rows} rows", partial(counted, *case)
        return
    for name, form in FORMATS.items():
        for rows in ROWS:
            yield (
                f"{name}, {rows} rows",
                partial(counted, product(rows, form), tile_of(rows, form), "product"),
            )
    for name, (case, tile) in CACHES.items():
        yield f"decode attention, cache in {name}", partial(counted, case, tile, "attention")


def elsewhere(target: str, wanted: Callable[[str], bool]) -> Iterator[str]:
    """A table of another GPU than Hopper's."""
    spec, (_, clock) = device_spec(target), MACHINES[target]
    issue = spec.cores * clock  # by each of the schedulers of a multiprocessor
    yield f"| {spec.bandwidth / 1e12:.2g} TB/s | tile | bytes | instructions | TB/s | a score | TFLOP/s |"
    yield "|---|---|---|---|---|---|---|"
    for name, tile in tiles().items():
        if wanted(name) and (case := cases_for(target).get(name)):
            [facts, *_], _ = kernel_facts(device(target), case[0], *case[1])
            found = count(facts, tile).products
            rate, products = (x / found * issue / 1e12 for x in (tile.bytes, tile.operations))
            # four warps share a tile of attention
            last = f"{4 * found / tile.scores:.2f} | {products:.0f}" if tile.scores else " | "
            yield f"| {name} | {tile.name} | {tile.bytes} | {found:.0f} | {rate:.1f} | {last} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default=H100.target, choices=[H100.target, *AMPERE], help="the GPU")
    parser.add_argument("parts", nargs="*", metavar="PART", help="of the rows' names")
    args = parser.parse_args()

    def wanted(name: str) -> bool:
        return not args.parts or any(part in name for part in args.parts)

    if args.target != H100.target:
        for line in elsewhere(args.target, wanted):
            print(line, flush=True)
    if card := {one.target: one for one in (H100, B200)}.get(args.target):
        print("| | tile | bytes | multiply | copy | waits | TB/s by issue | tiles at a time | ns a tile |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name, run in every(card):
            if wanted(name):
                print(f"| {name} | {run().row}", flush=True)


if __name__ == "__main__":
    main()
