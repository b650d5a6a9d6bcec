"""Print what a tile of weights or of a cache costs in the machine code of Hopper's kernels and of Blackwell's
products, without a GPU.

JAX_PLATFORMS=cpu python tools/kernel_counts.py [PART ...]  # with the extra `aot`; PART: of the rows' names

A process compiles for one of them: rows of a B200 are printed if PART is "B200".

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
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from kernel_facts import Case, decode, decode_eight_bits

from pallas_kernels.attention.ampere import LATENT_PROMPTS, LATENT_ROWS, shape_of_block
from pallas_kernels.compilation.ahead_of_time import KernelFacts, device, kernel_facts
from pallas_kernels.mosaic.ampere import DEPTH
from pallas_kernels.products import weights
from pallas_kernels.products.ampere import FEW_ROWS, MOST_ROWS
from pallas_kernels.products.hopper.grouped_product import FEW, SHARED_ROWS
from pallas_kernels.products.hopper.int4_product import TWO_BLOCKS
from pallas_kernels.quantization.formats import FP8, FP8_BY_FP8, INT8, WeightFormat
from pallas_kernels.quantization.int4 import GROUPS, TILE

ROWS_OF_PAIRS = 64  # of a block, at most, in which tiles of MXFP4 are copied in pairs
OUT, SIZE = 4096, 14336  # of the weight: the last of a layer of Llama 8B
PRODUCT, COPY, STORE = r"\b(?:UTC)?[HQI]G?MMA", r"\bUTMALDG", r"\bSTS\.128"
WAIT = r"WARPGROUP\.DEPBAR"
LABEL, INSTRUCTION = re.compile(r"^(\.L\w+):"), re.compile(r"/\*[0-9a-f]{4,}\*/\s+(\S.*)")
JUMP = re.compile(r"(@!?U?P\d+ |(?=BRA\S* !?U?P\d))?BRA(?:\.\S+)?(?: \S+,)? `\((\.L\w+)\)")
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
        products: matrix instructions of a tile.
        copies: TMA copies of a tile, by other warps; 0: there is none.
        warps: that copy.
        stores: of 16 bytes in each thread, to shared memory, of a tile that another warpgroup converts.
        pairs: whether each warpgroup that multiplies has another that copies for it.
    """

    name: str
    bytes: int
    products: int
    copies: float
    warps: int = 1
    stores: int = 0
    pairs: bool = False


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
        targets = [labels[jump[2]]] if jump else []
        if not (jump or end) or (jump or end)[1] is not None:  # type: ignore[index]
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
    products, waits = instructions(blocks, PRODUCT, tile.products)
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
    # in blocks of few rows, products with ones add the inputs that share an offset
    products = 16 if form.offset and rows <= TWO_BLOCKS else 8
    # of weights and rows, for two warpgroups; scales, offsets and sums are copied with each tile if it has
    # four groups, without offsets for two tiles
    copies = 1 + (0.5 * (1 + form.offset + (form.offset and rows > TWO_BLOCKS)) if form.group == 32 else 0)
    if form.group == 32 and not form.offset and rows <= ROWS_OF_PAIRS:
        copies /= 2
    return Tile("64 x 128", 64 * TILE // 2 + scales, products, copies)


def tile_in_tensor_memory(form: WeightFormat) -> Tile:
    """The tile of a product in Blackwell's kernel."""
    scales = 4 * 128 if form.group else 0
    return Tile("128 x 128", 128 * 128 + scales, 4 if form.inputs else 8, 3 if form.inputs else 2)


def tile_of_mma(rows: int, form: WeightFormat) -> Tile:
    """The tile of a product by `mma.sync`, in Ampere's kernel."""
    scales = 4 * 64 * TILE // form.group * (1 + form.offset) if form.group else 0
    sums = form.offset and rows <= FEW_ROWS
    columns = max(1, min(rows, MOST_ROWS[form.group != DEPTH]) // 8)
    products = TILE // DEPTH * columns * (1 + sums)
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
    return Tile(f"{step} tokens, {columns} queries", size * (1 if rank else 2), products, copies=0)


FP8_GROUPS = WeightFormat(FP8, 8, 128)
FORMATS = {
    "int8": INT8,
    "fp8": WeightFormat(FP8, 8),
    "fp8 x fp8": FP8_BY_FP8,
    "fp8 in groups of 128": FP8_GROUPS,
    "fp8 x fp8, both in groups of 128": replace(FP8_GROUPS, inputs=FP8),
    **{f"int4, groups of {group}": WeightFormat("int4", 4, group, offset=True) for group in GROUPS},
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


def every() -> Iterator[tuple[str, Callable[[], Count]]]:
    """Names of the table's rows, and what counts them."""
    for name, form in FORMATS.items():
        for rows in ROWS:
            yield (
                f"{name}, {rows} rows",
                partial(counted, product(rows, form), tile_of(rows, form), "product"),
            )
    for name in "int8", "fp8", "fp8 in groups of 128", "fp8 x fp8, both in groups of 128":
        for rows in ROWS[1:]:
            form = FORMATS[name]
            case = product(rows, form, B200), tile_in_tensor_memory(form), "product", B200
            yield f"on a B200: {name}, {rows} rows", partial(counted, *case)
    for name, (case, tile) in CACHES.items():
        yield f"decode attention, cache in {name}", partial(counted, case, tile, "attention")


def main() -> None:
    print("| | tile | bytes | multiply | copy | waits | TB/s by issue | tiles at a time | ns a tile |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, run in every():
        if any(part in name for part in sys.argv[1:]) or not (sys.argv[1:] or B200.target in name.lower()):
            print(f"| {name} | {run().row}", flush=True)


if __name__ == "__main__":
    main()
