"""Images on the devices: the encoder's weights, and a pool of embeddings that token ids may name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jengine.parallel.mesh import with_shardings
from jengine.scheduling.step_plan import Encoding
from jengine.vision.declared import Encoder
from jengine.vision.family import RowEncoder


class Visual(NamedTuple):
    """What a trunk's tokens are that stand for embeddings of images.

    Attributes:
        here: bool [N], whether a token does.
        rows: [N, hidden * levels], its embedding; of other tokens, any.
    """

    here: jax.Array
    rows: jax.Array


@dataclass(frozen=True)
class ImageShapes:
    """An encoder and its pool on a mesh. Both are whole on each device.

    Attributes:
        rows: embeddings in the pool.
        hidden: of the text model.
    """

    encoder: Encoder
    mesh: Mesh
    rows: int
    hidden: int

    @property
    def pool(self) -> jax.ShapeDtypeStruct:
        shape, every = (self.rows, self.hidden * self.encoder.vision.levels), PartitionSpec()
        return jax.ShapeDtypeStruct(shape, self.encoder.dtype, sharding=NamedSharding(self.mesh, every))

    @functools.cached_property
    def params(self) -> Any:
        return with_shardings(self.mesh, self.encoder.params, self.encoder.axes)

    @functools.cached_property
    def leaves(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.tree.leaves(self.params))

    @property
    def facts(self) -> list[Any]:
        """All that programs depend on."""
        return [self.rows, type(self.encoder.vision).__name__, self.encoder.facts]

    def words(self, patches: int) -> int:
        """int32 words of a packed bucket."""
        vision = self.encoder.vision
        return patches * (vision.features + vision.places + 1) + patches // vision.patches_per_row

    def pack(self, encoding: Encoding) -> np.ndarray:
        """int32 [words]: pixels as float32, places, segments, and each embedding's row of the pool."""
        buffer, n, at = np.zeros(self.words(encoding.bucket), np.int32), encoding.bucket, 0
        pixels, places, segments, targets = self._split(buffer, n)
        targets[:] = self.rows
        for segment, (part, rows) in enumerate(encoding.parts, 1):
            end, row = at + len(part.pixels), at // self.encoder.vision.patches_per_row
            pixels.view(np.float32)[at:end], places[at:end], segments[at:end] = (
                part.pixels,
                part.places,
                segment,
            )
            targets[row : row + len(rows)] = rows
            at = end
        return buffer

    def _split[Array: (np.ndarray, jax.Array)](self, packed: Array, patches: int) -> list[Array]:
        vision: RowEncoder = self.encoder.vision
        parts, at = list[Array](), 0
        for shape in (
            *((patches, vision.features), (patches, vision.places), (patches,)),
            (patches // vision.patches_per_row,),
        ):
            size = int(np.prod(shape))
            parts.append(packed[at : at + size].reshape(shape))
            at += size
        return parts

    def encode(self, patches: int) -> Callable[..., jax.Array]:
        """The function to compile: (leaves, pool, packed bucket) -> pool."""
        tree = jax.tree.structure(self.params)

        def encode(leaves: Sequence[jax.Array], pool: jax.Array, packed: jax.Array) -> jax.Array:
            pixels, places, segments, targets = self._split(packed, patches)
            floats = lax.bitcast_convert_type(pixels, jnp.float32)
            rows = self.encoder(jax.tree.unflatten(tree, leaves), floats, places, segments)
            return pool.at[targets].set(rows.astype(pool.dtype), mode="drop")

        return encode

    def temporaries(self, patches: int) -> int:
        """Bytes of an encoder's program beside its arguments: a generous count."""
        widest = max([leaf.shape[0] for leaf in self.leaves if leaf.ndim == 2], default=0)
        rows = min(patches, self.encoder.vision.largest)
        return 4 * (
            patches * (8 * widest + 2 * self.encoder.vision.features) + 2 * 32 * rows * min(rows, 1024)
        )


def visual(tokens: jax.Array, pool: jax.Array, vocab_size: int) -> Visual:
    """The tokens whose ids name rows of the pool."""
    return Visual(tokens >= vocab_size, pool.at[tokens - vocab_size].get(mode="clip"))
