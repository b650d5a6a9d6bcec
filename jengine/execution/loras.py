"""LoRA adapters on the devices: stacked for every adaptable weight, and written place by place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jengine.execution.sampling_row import LORA_WORD
from jengine.models import Model, Params
from jengine.models.adapters import LoraWeights, Module, Site, sites
from jengine.parallel.collectives import TENSOR
from jengine.parallel.mesh import partition
from pallas_kernels.products.adapted import Adapted, Stack, columns_of
from pallas_kernels.products.weight import Forms
from pallas_kernels.products.weights import is_weight, weight_of
from pallas_kernels.products.weights import prepare as prepare_product

HEADER = 64  # bytes before an adapter's numbers: the place to write them to; keeps these aligned

Stacks = tuple[Stack, ...]


@dataclass(frozen=True)
class LoraShapes:
    """The stacked adapters of a model on a mesh.

    Attributes:
        places: how many adapters have a place on the devices.
        max_rank: the largest rank of an adapter.
        targets: see `models.adapters.sites`.
    """

    model: Model
    mesh: Mesh
    places: int
    max_rank: int
    targets: tuple[str, ...] | None = None

    @property
    def columns(self) -> int:
        """Columns of each place, at least the largest rank."""
        return columns_of(self.max_rank)

    @property
    def facts(self) -> list[Any]:
        """All that programs depend on, besides the model."""
        return [self.places, self.columns, None if self.targets is None else sorted(self.targets)]

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        return sites(self.model, self.targets)

    @functools.cached_property
    def modules(self) -> dict[str, Module]:
        """All modules that an adapter may change, by name."""
        return {module.name: module for site in self.sites for module in site.modules}

    def of(self, *, logits: bool) -> tuple[tuple[int, Site], ...]:
        """The sites of programs that compute logits, or of trunks, with their numbers."""
        return tuple(
            (number, site) for number, site in enumerate(self.sites) if (site.role == "head") == logits
        )

    @functools.cached_property
    def fused(self) -> dict[str, Site]:
        """Parameters with all experts of a layer, by transformers' names."""
        return {site.fused: site for site in self.sites if site.fused is not None}

    @functools.cached_property
    def stacks(self) -> Stacks:
        """Abstract arrays, with shardings: one stack for each site."""
        return tuple(self._stack(site, self.places * self.columns) for site in self.sites)

    @property
    def packed(self) -> jax.ShapeDtypeStruct:
        """One adapter's numbers, [devices, numbers of a device], see `packed`."""
        shape = self.mesh.size, self._numbers
        return self._array(shape, PartitionSpec(TENSOR, None))

    @functools.cached_property
    def _numbers(self) -> int:
        numbers: int = sum(math.prod(shape) for site in self.sites for shape in self._own(site))
        return numbers

    def _stack(self, site: Site, columns: int) -> Stack:
        a = self._array(site.a_shape(columns), self._spec(site.a_axes))
        b = tuple(self._array(shape, self._spec(site.b_axes)) for shape in site.b_shapes(columns))
        return Stack(a, b, tuple(segment.module for segment in site.segments))  # type: ignore[arg-type]

    def _array(self, shape: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self.model.dtype, sharding=NamedSharding(self.mesh, spec))

    def _spec(self, names: Sequence[str | None]) -> PartitionSpec:
        return partition(names, self.mesh, expert_parallel=self.model.config.expert_shards > 1)

    def _own(self, site: Site) -> list[tuple[int, ...]]:
        """Shapes of one device's part of one adapter, in the order of a stack's leaves."""
        arrays = jax.tree.leaves(self._stack(site, self.columns))
        return [tuple(array.sharding.shard_shape(array.shape)) for array in arrays]

    # --- on the host --------------------------------------------------------------------------------

    def nothing(self) -> np.ndarray:
        """What `pack` gives for an adapter of zeros, which empties a place."""
        return np.zeros(HEADER + math.prod(self.packed.shape) * np.dtype(self.model.dtype).itemsize, np.uint8)

    def pack(self, weights: LoraWeights) -> np.ndarray:
        """An adapter as `write` takes it: uint8 [HEADER + bytes]. Ranks are padded with zeros."""
        devices, packed = self.mesh.size, self.nothing()
        numbers = packed[HEADER:].view(np.dtype(self.model.dtype)).reshape(devices, -1)
        at = 0
        for site in self.sites:
            axes = [site.a_axes, *[site.b_axes] * len(site.segments)]
            for array, names in zip(self._parts(site, weights), axes, strict=True):
                each = _shards(array, self._spec(names), devices)
                size = each[0].size
                for device, part in enumerate(each):
                    numbers[device, at : at + size] = part.reshape(-1)
                at += size
        return packed

    def _parts(self, site: Site, weights: LoraWeights) -> list[np.ndarray]:
        """An adapter's a and b of a site, in the layout of a stack with one place."""
        dtype = np.dtype(self.model.dtype)
        a = np.zeros(site.a_shape(self.columns), dtype)
        whole = [np.zeros((*site.shape[:-1], self.columns), dtype) for _ in range(site.parts)]
        for number, module in enumerate(site.modules):
            if module.name not in weights.factors:
                continue
            expert, number = divmod(number, site.parts)
            target = a[number] if site.experts is None else a[expert, number]
            down, up = weights.factors[module.name]
            rank, outs = len(down), len(site.shape) - 1
            for piece in module.pieces:
                inputs = piece.part[outs] if len(piece.part) > outs else slice(None)
                target[:rank, inputs] = down[:, piece.columns]
                place = whole[number][(*piece.part[:outs], ...)]
                place[..., :rank] = up[piece.rows].reshape(*place.shape[:-1], rank)
        return [a, *(whole[segment.module][site.rows(segment)] for segment in site.segments)]


def write(stacks: Stacks, packed: jax.Array, place: jax.Array) -> Stacks:
    """The function to compile: writes a device's numbers of an adapter to a place, int32 [1], from 0."""
    leaves, tree = jax.tree.flatten(stacks)
    places, numbers, at = [], packed.reshape(-1), 0
    columns = _columns_per_place(stacks, numbers.size)
    for stack in stacks:
        for array, axis in [(stack.a, stack.a.ndim - 2), *[(b, b.ndim - 1) for b in stack.b]]:
            shape = (*array.shape[:axis], columns, *array.shape[axis + 1 :])
            size = math.prod(shape)
            part = lax.slice_in_dim(numbers, at, at + size).reshape(shape)
            places.append(lax.dynamic_update_slice_in_dim(array, part, place[0] * columns, axis))
            at += size
    assert len(places) == len(leaves) and at == numbers.size
    written: Stacks = jax.tree.unflatten(tree, places)
    return written


def _columns_per_place(stacks: Stacks, numbers: int) -> int:
    """Columns of one of several equal places, one of which has so many numbers."""
    total: int = sum(leaf.size for leaf in jax.tree.leaves(stacks))
    assert total % numbers == 0, "places have equal sizes"
    columns: int = stacks[0].a.shape[-2]
    return columns // (total // numbers)


def mask_of(words: jax.Array, columns: int, places: int) -> jax.Array:
    """The columns of the adapters that rows' sampling words [rows, ...] name: bool [rows, all columns]."""
    place = words[:, LORA_WORD]
    return place[:, None] == 1 + jnp.arange(columns) // (columns // places)


def lora(
    shapes: LoraShapes, forms: Forms, places: int, *, logits: bool
) -> Callable[[Params, Stacks, jax.Array], Params] | None:
    """(parameters, stacks, sampling words of each row) -> the parameters with adapted weights in the place of
    those that adapters may change, in programs that compute logits or in trunks. None: they change none.

    Args:
        places: the number of places that are computed, from the first.
    """
    adapted, columns = shapes.of(logits=logits), places * shapes.columns
    if not adapted:
        return None

    def adapt(params: Params, stacks: Stacks, words: jax.Array) -> Params:
        mask = mask_of(words, columns, places)
        leaves, tree = jax.tree.flatten(params, is_leaf=is_weight)
        for number, site in adapted:
            leaves[site.index] = Adapted(
                weight_of(leaves[site.index]), stacks[number].first(columns), mask, forms
            )
        return jax.tree.unflatten(tree, leaves)

    return adapt


def prepare(shapes: LoraShapes) -> None:
    """Registers the CPU kernels of products with adapters, if there are any."""
    if shapes.mesh.devices.flat[0].platform == "cpu" and shapes.stacks:
        prepare_product(shapes.stacks[0].a)


def _shards(array: np.ndarray, spec: PartitionSpec, devices: int) -> list[np.ndarray]:
    """Each device's part of an array that lies over them like this."""
    for axis, name in enumerate(spec):
        if name is not None:
            return np.split(array, devices, axis)
    return [array] * devices
