"""The programs of an engine that reads images: buckets of patches, and the size of the pool."""

from __future__ import annotations

import dataclasses

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.speculation import NAME
from jengine.devices.device_defaults import sizes
from jengine.execution.images import ImageShapes
from jengine.execution.spec import ExecutionSpec
from jengine.table.program_table import ProgramTable
from jengine.vision.declared import Encoder
from jengine.vision.family import Vision

MOST_ROWS = 16384  # embeddings in the pool, unless the options say otherwise
FEWEST_PATCHES = 256  # of a bucket, unless no part has as many
PACKED = 4  # parts of a bucket, if all parts have the same size


def with_images(config: EngineConfig, spec: ExecutionSpec, vision: Vision) -> ExecutionSpec:
    """The spec with the encoder's programs.

    Raises:
        InvalidArgument: an option does not work with images, or the pool is too small.
    """
    if spec.draft is not None:
        limit = 'no draft model or head with images; limit_mm_per_prompt={"image": 0} serves text alone'
        raise InvalidArgument(NAME, spec.draft.config.family, limit)
    part, rows = vision.largest // vision.patches_per_row, config.image_pool_rows
    if rows is not None and rows < part:
        raise InvalidArgument("image_pool_rows", rows, f"must be at least {part}, as a part of an image has")
    if rows is None:
        rows = max(min(spec.max_model_len, MOST_ROWS), min(vision.most_rows, MOST_ROWS), part)
    encoder, model = Encoder.of(vision, spec.model.dtype), spec.model
    if model.text_part is not None:
        model = dataclasses.replace(model, text_part=dataclasses.replace(model.text_part, why=""))
    buckets = encoder_buckets(vision.smallest, vision.largest, single=config.batch_invariant)
    table = dataclasses.replace(spec.table, encoders=buckets)
    return dataclasses.replace(
        spec,
        model=model,
        table=with_whole(config, spec, table, part) if vision.ahead else table,
        images=ImageShapes(encoder, spec.mesh, rows, model.config.hidden_size),
    )


def with_whole(config: EngineConfig, spec: ExecutionSpec, table: ProgramTable, rows: int) -> ProgramTable:
    """The table for images whose tokens see each other: a step can hold all of its `rows` tokens.

    Raises:
        InvalidArgument: it cannot.
    """
    size = table.tile_size
    tiles, name = -(-rows // size), "max_num_batched_tokens"
    least, budget = (
        spec.max_slots + tiles * size,
        getattr(sizes(config, spec.mesh.devices.flat[0].platform), name),
    )
    if budget < least:
        limit = f"must be at least {least}: {spec.max_slots} rows, and the {rows} tokens of an image in tiles"
        raise InvalidArgument(name, budget, f"{limit} of {size}, since they see each other")
    if table.batch_invariant:
        table = dataclasses.replace(table, tile_buckets=(max(tiles, table.max_tiles),))
    return dataclasses.replace(table, whole_tiles=tiles)


def encoder_buckets(smallest: int, largest: int, *, single: bool) -> tuple[int, ...]:
    """Patches of the encoder's programs, ascending: multiples of the smallest part, each at least twice the
    one before. The last one holds the largest part.

    Args:
        single: whether one program encodes everything, so that it always rounds equally.
    """
    if single:
        return (largest,)
    if smallest == largest:
        return smallest, PACKED * smallest
    buckets = [min(-(-FEWEST_PATCHES // smallest) * smallest, largest)]
    while buckets[-1] < largest:
        buckets.append(min(2 * buckets[-1], largest))
    return tuple(buckets)
