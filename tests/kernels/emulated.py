"""Mosaic GPU kernels for Ampere on a CPU: their own bodies, with arrays for references and stand-ins for what
Pallas does not interpret.

Pallas interprets neither `plgpu.mma` nor copies without a barrier. Here a body runs in Python, block by
block. A copy lands either when it is begun or not before a wait asks for it, its target garbage until then;
on a GPU it lands somewhere between. Copies may land at a barrier, as TMA's do. Layouts, conversions in
registers, and what threads of one block do to each other, are not seen: those are the compiler's and Mosaic's
own barriers'.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import ampere
from pallas_kernels.mosaic.ampere import DEPTH
from tests.kernels.interpreted import Runner

Landing = Literal["early", "late"]


class Ref:
    """A reference to part of an array. Indices outside of it raise an error; a GPU would access other
    memory.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def at(self) -> Ref:
        return self

    @property
    def T(self) -> Ref:
        return Ref(self.array.T)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def __getitem__(self, index: Any) -> Any:
        if index is Ellipsis:
            return jnp.asarray(self.array)
        index = index if isinstance(index, tuple) else (index,)
        part = self.array[tuple(_bounded(i, size) for i, size in zip(index, self.array.shape, strict=False))]
        return Ref(part) if isinstance(part, np.ndarray) else jnp.asarray(part)

    def __setitem__(self, index: EllipsisType, values: jax.Array) -> None:
        assert index is Ellipsis and values.shape == self.array.shape and values.dtype == self.array.dtype
        self.array[...] = np.asarray(values)


def garbage(dtype: Any) -> float:
    """What memory holds at first: NaN, or of integers the largest."""
    return np.nan if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).max


def _bounded(index: Any, size: int) -> Any:
    if index == slice(None):
        return index
    start, length = (int(index.start), index.size) if isinstance(index, pl.Slice) else (int(index), None)
    assert start >= 0 and start + (length or 1) <= size, f"index {start}, {length} of {size}"
    return start if length is None else slice(start, start + length)


class Waiting(list[tuple[np.ndarray, np.ndarray]]):
    """Copies in flight, oldest first: sources and targets."""

    def land(self, left: int = 0) -> None:
        while len(self) > left:
            source, target = self.pop(0)
            target[...] = source


class Barriers:
    """Barriers in shared memory, or one of them."""

    def __init__(self, arrivals: int, copies: list[Waiting]) -> None:
        self.arrivals, self.copies = arrivals, copies

    @property
    def at(self) -> Barriers:
        return self

    def __getitem__(self, index: Any) -> Barriers:
        return Barriers(self.arrivals, [self.copies[int(index)]])

    def wait(self) -> None:
        (copies,) = self.copies
        assert len(copies) == self.arrivals, f"{len(copies)} copies arrive, {self.arrivals} are awaited"
        copies.land()


@dataclass
class Copies:
    """Copies to shared memory in flight: those without a barrier, and the others at theirs."""

    landing: Landing
    groups: Waiting = field(default_factory=Waiting)

    def begin(self, source: Ref, target: Ref, barrier: Barriers | None, *, oob_mode: Any) -> None:
        assert source.shape == target.shape and source.dtype == target.dtype
        assert oob_mode == plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # the others do not compile
        target.array[...] = source.array if self.landing == "early" else garbage(target.dtype)
        (self.groups if barrier is None else barrier.copies[0]).append((source.array, target.array))

    def wait(self, n: int) -> None:
        self.groups.land(n)


def emulator(landing: Landing, tma: bool = False) -> Runner:
    """Runs kernels in Python, as for a GPU with TMA or without."""

    def run(function: Callable[..., Any], *args: Any, **how: Any) -> Any:
        with emulated(landing), mock.patch.object(ampere, "has_tma", lambda device: tma):
            return function(*args, **how)

    return Runner(run, None)


@contextmanager
def emulated(landing: Landing) -> Iterator[None]:
    """In this context, kernels are emulated. Scratch memory and results are garbage at first; a copy without
    a wait is an error.
    """
    place: dict[str, int] = {}
    copies = Copies(landing)

    def kernel(
        body: Callable[..., None], *, out_type: Any, scratch_types: Any, grid: Any, grid_names: Any, **_: Any
    ) -> Any:
        def fresh(x: Any) -> Ref | Barriers:
            if isinstance(x, plgpu.Barrier):
                return Barriers(x.num_arrivals, [Waiting() for _ in range(int(np.prod(x.num_barriers)))])
            return Ref(np.full(x.shape, garbage(x.dtype), x.dtype))

        def run(*args: Any) -> list[jax.Array]:
            given = jax.tree.map(lambda x: Ref(np.asarray(x)), args)
            out = [np.full(x.shape, np.nan, x.dtype) for x in out_type]
            for index in itertools.product(*map(range, grid)):
                place.update(zip(grid_names, index, strict=True))
                scratch = jax.tree.map(fresh, scratch_types)
                body(*given, *map(Ref, out), *scratch)
                barriers = [x for x in jax.tree.leaves(scratch) if isinstance(x, Barriers)]
                assert not copies.groups and not any(any(x.copies) for x in barriers)
            return [jnp.asarray(x) for x in out]

        return run

    def mma(acc: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        assert acc.dtype == jnp.float32 and left.dtype == right.dtype
        return acc + jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32), precision="highest")

    def gathered(ref: Ref, line: Any, column: Any, layout: Any) -> jax.Array:
        assert (line >= 0).all() and (column >= 0).all()
        return jnp.asarray(ref.array.reshape(-1, ref.shape[-1])[np.asarray(line), np.asarray(column)])

    def converted(numbers: Any, kind: str, dtype: Any) -> jax.Array:
        floats = np.asarray(numbers).view(jnp.dtype(kind)).astype(np.float32)
        return jnp.asarray(np.where(np.isnan(floats), 480, floats).astype(dtype))

    def left_side(numbers: jax.Array, step: int, kind: str, dtype: Any) -> jax.Array:
        return converted(numbers[:, step * DEPTH : (step + 1) * DEPTH], kind, dtype)

    def transposed(ref: Ref, size: int, kind: str, dtype: Any) -> jax.Array:
        numbers = converted(ref.array, kind, dtype)
        return numbers.T.reshape(-1, 8, 2, DEPTH).swapaxes(1, 2).reshape(-1, DEPTH)

    def fori_loop(start: int, end: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        for i in range(int(start), int(end)):
            carry = body(jnp.int32(i), carry)
        return carry

    def when(condition: Any) -> Callable[[Callable[[], None]], None]:
        return lambda body: body() if condition else None

    stand_ins = {
        "kernel": kernel,
        "mma": mma,
        "copy_gmem_to_smem": copies.begin,
        "wait_gmem_to_smem": copies.wait,
        "barrier_wait": Barriers.wait,
        "commit_smem": lambda: None,
        "load": lambda ref, *, layout, optimized=True: ref[...],
        "layout_cast": lambda x, layout: x,
        "broadcasted_iota": lambda dtype, shape, axis, *, layout: lax.broadcasted_iota(dtype, shape, axis),
        "store": lambda ref, values, *, optimized: ref.__setitem__(..., values),
    }
    in_registers = {
        "gathered": gathered,
        "left_side": left_side,
        "right_side": lambda x, *, eight_bits: x.T,
        "transposed": transposed,
    }
    loops = {"axis_index": lambda name: jnp.int32(place[name]), "fori_loop": fori_loop}
    with (
        mock.patch.multiple(plgpu, create=True, **stand_ins),
        mock.patch.multiple(lax, **loops),
        mock.patch.multiple(ampere, **in_registers),
        mock.patch.object(pl, "when", when),
    ):
        yield
