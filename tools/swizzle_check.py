"""Checks that registers, tensor cores and TMA agree about where swizzled shared memory holds each number.

A swizzle of n bytes permutes the 16-byte chunks of 8 rows of n bytes, differently in each row. TMA and the
tensor cores take the row from the address. Mosaic's loads and stores of registers take it from the offset in
the slice that they are given (jax 0.11 and 0.12). Both are the same only in slices that begin at a multiple
of 8 * n bytes. But Mosaic infers tiles of fewer than 8 rows where TMA copies fewer, and column slices of such
tiles begin in between. Registers then find other numbers than TMA has put there, without an error. Pallas's
interpreter ignores layouts, so it cannot show this.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax.experimental.mosaic.gpu import layout_inference
from jax.experimental.mosaic.gpu.inference_utils import is_transformable_smem_memref
from jax.experimental.mosaic.gpu.utils import bitwidth
from jaxlib.mlir import ir

ROWS = 8  # after which a swizzle repeats
VIEWS = {f"memref.{name}" for name in ("cast", "subview", "transpose", "collapse_shape", "expand_shape")} | {
    "mosaic_gpu.with_transforms"
}
BUFFERS = {"mosaic_gpu.slice_smem"}  # aligned to 1024 bytes, where all swizzles repeat
TMA = {"mosaic_gpu.async_load", "mosaic_gpu.async_store", "mosaic_gpu.async_prefetch"}


@contextmanager
def accesses() -> Iterator[dict[str, dict[str, bool]]]:
    """Collects the accesses to swizzled shared memory, other than TMA's, of kernels that this process lowers
    meanwhile.

    Yields a dictionary that is filled: for the kernels of each name, whether each access is proven to begin
    where the swizzle does.
    """
    aligned: dict[str, dict[str, bool]] = {}
    infer = layout_inference.infer_layout

    def inferred(module: Any, **options: Any) -> None:
        infer(module, **options)
        # its number may differ when it is compiled
        name, _ = module.operation.attributes["mosaic_gpu.dump_basename"].value.rsplit("_", 1)
        aligned.setdefault(name, {}).update(accesses_of(module))

    layout_inference.infer_layout = inferred
    try:
        yield aligned
    finally:
        layout_inference.infer_layout = infer


def accesses_of(module: Any) -> dict[str, bool]:
    """The accesses of a module in Mosaic's dialect, whose layouts have been inferred, as in `accesses`."""
    aligned: dict[str, bool] = {}

    def visit(op: Any) -> Any:
        if "in_transforms" in op.attributes and op.name not in VIEWS | TMA:
            refs = [operand for operand in op.operands if is_transformable_smem_memref(operand)]
            for ref, transforms in zip(refs, op.attributes["in_transforms"], strict=True):
                tile, swizzle = _read(transforms)
                if swizzle:
                    alignment = _alignment(ref)
                    place = " < ".join(map(":".join, re.findall(r'([\w.]+)":(\d+)', str(op.location))[:2]))
                    text = (
                        f"{op.name} ({place}): tiles {tile}, begins at a multiple of {alignment} bytes, the"
                        " swizzle repeats after {}"
                    )
                    aligned[text.format(ROWS * swizzle)] = alignment % (ROWS * swizzle) == 0
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return aligned


def _read(transforms: Any) -> tuple[tuple[int, ...], int]:
    """The tile, of the last dimensions, and the bytes of the swizzle; 0: none."""
    text = str(transforms)
    tile, swizzle = re.search(r"tile<\[([\d, ]+)\]", text), re.search(r"swizzle<(\d+)", text)
    return tuple(map(int, tile[1].split(","))) if tile else (), int(swizzle[1]) if swizzle else 0


def _alignment(ref: Any) -> int:
    """The largest number of bytes that is known to divide the place in its buffer where a reference begins;
    0: it begins there.
    """
    op: Any = ref.owner.opview if isinstance(ref.owner, ir.OpView | ir.Operation) else None
    if op is None or op.name not in VIEWS | BUFFERS:
        return 1
    if op.name in BUFFERS:
        return 0
    source = op.operands[0]
    known = _alignment(source)
    if op.name != "memref.subview":
        return known
    kind, (tile, _) = ir.MemRefType(source.type), _read(op.attributes["in_transforms"][0])
    strides, _ = kind.get_strides_and_offset()
    tiles = (1,) * (kind.rank - len(tile)) + tile
    dynamic = iter(op.offsets)
    for size, part, offset, stride, step in zip(
        kind.shape, op.static_sizes, op.static_offsets, strides, tiles, strict=True
    ):
        # slices begin with whole tiles
        steps = offset
        if ir.ShapedType.is_dynamic_size(offset):
            steps = math.lcm(step, layout_inference.dynamic_gcd(size, next(dynamic)))
        if size == part or offset == 0:
            continue
        numbers = stride * math.prod(
            other for other, wider in zip(tiles, strides, strict=True) if wider > stride
        )
        known = math.gcd(known, steps * numbers * bitwidth(kind.element_type) // 8)
    return known
