"""Compile-time options of an attention kernel on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.llvm import amx
from pallas_kernels.llvm.formats import processor
from pallas_kernels.llvm.native import Target
from pallas_kernels.llvm.types import LANES

# Maximum rows of an item, unless a query has more: of decode rows, and of tiles whose heads are so short that
# the rows stay in the cache.
ROWS, TILE_ROWS, SHORT = 96, 192, 128


@dataclass(frozen=True)
class Form:
    """Compile-time options of a kernel.

    Attributes:
        stored: dtype of the pages; uint8 is the bits of float8_e4m3fn. uint8 and int8 have scales.
        inputs: dtype of queries and results, bfloat16 or float32.
        head_dim, page_size: of the cache.
        group: query heads that share a kv head.
        rows: maximum rows of an item.
        most: maximum rows multiplied at a time, so that their sums stay in registers.
        strip: rows multiplied at a time.
        columns: vectors of columns multiplied at a time, 1, 2 or 4.
        decode: whether a query is a row of its own rather than part of a tile.
        ahead: whether queries of tiles may see later tokens.
        pair_keys, pair_values: whether keys, and weights and values, are multiplied as pairs of bfloat16
            rather than as float32.
        tiles: whether these pairs are multiplied by AMX.
    """

    stored: str
    inputs: str
    head_dim: int
    page_size: int
    group: int
    rows: int
    most: int
    strip: int
    columns: int
    decode: bool
    pair_keys: bool
    pair_values: bool
    tiles: bool = False
    ahead: bool = False

    @property
    def name(self) -> str:
        kind = "decode" if self.decode else "prefill_ahead" if self.ahead else "prefill"
        kind += "_tiles" if self.tiles else ""  # a process may lack the permission for them
        return f"jengine_{kind}_{self.stored}_{self.inputs}_{self.head_dim}_{self.page_size}_{self.group}"

    @property
    def quantized(self) -> bool:
        return self.stored in ("int8", "uint8")

    @property
    def depth(self) -> int:
        """32-bit numbers in a query and a key."""
        return -(-self.head_dim // (2 * LANES if self.pair_keys else LANES)) * LANES

    @property
    def vectors(self) -> int:
        """Vectors in a value, a multiple of `block`."""
        least = -(-self.head_dim // LANES)
        return least + least % 2 if self.columns > 1 or self.pair_values else least

    @property
    def in_place(self) -> bool:
        """Whether values are multiplied where they are. For few queries, packing them takes longer than
        converting them for each strip, except from float8."""
        costly = self.stored == "uint8" and self.rows > self.group
        return self.decode and not costly and self.vectors * LANES == self.head_dim

    @property
    def spread(self) -> bool:
        """Whether prefetching is spread over all steps of a block of tokens, for a single query. Its products
        are so small that memory would be idle meanwhile.
        """
        return self.decode and self.rows == self.group and self.columns == 4

    @property
    def several(self) -> Form | None:
        """The options for several decode rows of a sequence; None if one fills an item."""
        count = ROWS // self.group
        if not self.decode or count < 2:
            return None

        def padded(strip: int) -> int:
            """Rows that are multiplied for 2 to 8 queries."""
            return sum(-(-self.group * queries // strip) * strip for queries in range(2, 9))

        strip = min(range(self.most, self.most // 2, -1), key=padded)
        return replace(self, rows=self.group * count, strip=strip)

    @property
    def block(self) -> int:
        """Vectors of values multiplied at a time."""
        return max(n for n in range(1, self.columns + 1) if self.vectors % n == 0)


def form(
    target: Target,
    stored: str,
    inputs: str,
    head_dim: int,
    page_size: int,
    group: int,
    *,
    decode: bool,
    ahead: bool = False,
) -> Form:
    """The options for such a cache, with `group` query heads per kv head, on this processor."""
    at = processor(target)
    columns = 4 if at.lanes == LANES else 1
    max_rows = {16: 6, 8: 6}.get(at.lanes, 4 if target.architecture == "aarch64" else 2)
    pairs = at.pairs and target.architecture == "x86" and inputs == "bfloat16" and stored != "float32"
    tiles = pairs and not decode and amx.permitted() and at.tiles
    strip = -(-group // -(-group // max_rows)) if decode else amx.SIDE if tiles else max_rows
    # decoding waits for memory, and pairs save conversions
    pairs = pairs and (decode or at.fast_pairs or tiles)
    rows = group if decode else max(group, TILE_ROWS if head_dim <= SHORT else ROWS)
    key = rows, max_rows, strip, columns, decode, pairs, pairs and not decode, tiles, ahead
    return Form(stored, inputs, head_dim, page_size, group, *key)
