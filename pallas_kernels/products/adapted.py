"""A weight with low-rank adapters (LoRA): x @ W.T + where(mask, x @ A.T, 0) @ B.T.

The adapters of all places are stacked along the rank axis, so two products with fixed shapes serve any mix of
adapters in a batch. The mask selects the columns of each row's adapter. All others become zeros, even if the
first product is infinite or NaN there, and adding zeros is exact: a row's bits do not depend on other
adapters, nor on the place of its own, if the columns of a place are a power of two, or a multiple of 64 (see
`columns_of`). The second product multiplies these zeros by other adapters' B, so stacks must be finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.devices import traced_for_cpu
from pallas_kernels.products.groups import Groups
from pallas_kernels.products.plain import Plain
from pallas_kernels.products.rows import Rows, array_of
from pallas_kernels.products.weight import Forms, Weight
from pallas_kernels.products.xla import multiply
from pallas_kernels.targets import Impl

LEAST, VECTOR = 16, 64  # columns of a place; numbers in a CPU's longest vector
FEW = 64  # inputs up to which XLA's form of a product is faster than a CPU's kernel


def columns_of(rank: int) -> int:
    """Columns of a place that has room for this rank. Sums over vectors, which are added by halves, then have
    the same bits at every place.
    """
    if rank > VECTOR:
        return -(-rank // VECTOR) * VECTOR
    return max(LEAST, 1 << (rank - 1).bit_length())


@partial(jax.tree_util.register_dataclass, data_fields=("a", "b"), meta_fields=("parts",))
@dataclass(frozen=True)
class Stack:
    """The adapters of one weight. All numbers are finite.

    A fused weight has several parts, such as queries, keys and values, each with adapters of its own. Its
    second axis is divided into segments; each belongs to a part.

    Attributes:
        a: [parts, places * columns, in], after an axis of experts if the weight has one.
        b: for each segment, [*out of the segment, places * columns], after the same axis.
        parts: of the segments.
    """

    a: jax.Array
    b: tuple[jax.Array, ...]
    parts: tuple[int, ...]

    def first(self, columns: int) -> Stack:
        """The first places' columns, so many."""
        if columns == self.a.shape[-2]:
            return self
        return replace(self, a=self.a[..., :columns, :], b=tuple(b[..., :columns] for b in self.b))

    def __getitem__(self, index: Any) -> Stack:
        """An expert's adapters."""
        return replace(self, a=self.a[index], b=tuple(b[index] for b in self.b))


@partial(jax.tree_util.register_dataclass, data_fields=("base", "stack", "mask"), meta_fields=("forms",))
@dataclass(frozen=True)
class Adapted:
    """A weight and its adapters; see `products.Weight`.

    Attributes:
        mask: bool [rows, places * columns], where a row's adapter has its columns.
        forms: of the adapters' products on a CPU.
    """

    base: Weight
    stack: Stack
    mask: jax.Array
    forms: Forms = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def eager(self) -> bool:
        return self.base.eager

    def product(self, x: Rows, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        array = array_of(x)
        wanted = jnp.dtype(dtype or array.dtype)
        # XLA's loops on a CPU process bfloat16 numbers one by one; on a GPU, float32 would take memory
        sums = jnp.dtype(jnp.float32) if traced_for_cpu() else wanted
        return (self.base.product(array, sums) + self._added(array, sums)).astype(wanted)

    def _added(self, x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
        """What adapters add to the product of x [rows, in] -> [rows, outs]."""
        stack, forms = self.stack, self.forms
        parts, columns, size = stack.a.shape
        inner = Plain(stack.a.reshape(-1, size), forms).product(x).reshape(-1, parts, columns)
        inner = jnp.where(self.mask[:, None], inner, 0)
        each = [
            _raised(inner[:, part], b, forms, dtype).reshape(len(x), *b.shape[:-1])
            for part, b in zip(stack.parts, stack.b, strict=True)
        ]
        return _joined(each).reshape(len(x), -1)

    def grouped_product(
        self, x: jax.Array, groups: Groups, *, impl: Impl = "auto", device: jax.Device | None = None
    ) -> jax.Array:
        stack, options = self.stack, dict[str, Any](impl=impl, device=device)
        each_chooses = len(groups.place) // len(self.mask)  # experts
        mask = self.mask[groups.row // each_chooses]
        inner = jnp.where(mask[:, None], Plain(stack.a).grouped_product(x, groups, **options), 0)
        each = [
            Plain(b).grouped_product(inner[:, part], groups, **options)
            for part, b in zip(stack.parts, stack.b, strict=True)
        ]
        return self.base.grouped_product(x, groups, **options) + _joined(each)

    def of_expert(self, expert: jax.Array, tokens: jax.Array) -> Weight:
        return Adapted(self.base.of_expert(expert, tokens), self.stack[expert], self.mask[tokens], self.forms)

    def take(self, rows: jax.Array) -> jax.Array:
        [b], [a] = self.stack.b, self.stack.a
        inner = jnp.where(self.mask, Plain(b).take(rows), 0)
        taken = self.base.take(rows)
        return (taken + multiply(inner, a.T, jnp.float32)).astype(taken.dtype)

    def __getitem__(self, index: Any) -> Weight:
        raise NotImplementedError("parts of an adapted weight are not used alone")


def _raised(inner: jax.Array, b: jax.Array, forms: Forms, dtype: jnp.dtype[Any]) -> jax.Array:
    """The product of inner results [rows, columns] and b [*outs, columns] -> [rows, outs].

    A CPU's kernel adds up vectors of inputs for each output, so with few inputs XLA's form is faster: six
    times with 16, and no more with 128 (32 rows, 2048 outputs, bfloat16).
    """
    if b.shape[-1] <= FEW:
        return multiply(inner, b.reshape(-1, b.shape[-1]), dtype)
    return Plain(b, forms).product(inner, dtype)


def _joined(segments: Sequence[jax.Array]) -> jax.Array:
    return segments[0] if len(segments) == 1 else jnp.concatenate(segments, axis=2)
