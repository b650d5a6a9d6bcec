"""Calls a compiled program with less work for each argument than `jax.stages.Compiled`.

A trunk has hundreds of arguments, the weights. In every call, `Compiled` compares the type and layout of each
with what was compiled, a third of the host's time of a step on a GPU. Here only the first call does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import pxla  # JAX has no public way to call an executable


class QuickCall:
    """A program whose arguments always have the shapes, dtypes and shardings that it was compiled for.

    Args:
        program: has neither effects nor callbacks. Its first call here compares all arguments, as usual.

    Attributes:
        program: the same.
    """

    def __init__(self, program: jax.stages.Compiled) -> None:
        executable: Any = program._executable
        run = executable.unsafe_call
        self.program, self._compared = program, False
        self._execute, self._handlers = run.xla_executable.execute_sharded, run.out_handler.handlers
        self._out_tree = program.out_tree
        self._kept = sorted(run.kept_var_idx)  # XLA removes arguments that are not used
        kinds = zip(self._kept, executable.in_avals, executable._in_shardings, strict=True)
        self._kinds = {
            i: (like, where, where.addressable_devices_indices_map(like.shape)) for i, like, where in kinds
        }

    def __call__(self, weights: Sequence[jax.Array], *others: Any) -> Any:
        """The program's results.

        Args:
            weights: a flat sequence.
            others: trees of arrays, on the program's devices or the host.

        Raises:
            TypeError: an array on the host has another shape or dtype than the program was compiled for.
        """
        if not self._compared:
            outs = self.program(weights, *others)
            self._compared = True
            return outs
        flat = [*weights]
        for i, array in enumerate(jax.tree.leaves(others), len(flat)):
            flat.append(self._placed(i, array) if type(array) is np.ndarray else array)
        if len(self._kept) < len(flat):
            flat = [flat[i] for i in self._kept]
        return jax.tree.unflatten(self._out_tree, self._execute(flat).consume_with_handlers(self._handlers))

    def _placed(self, number: int, array: np.ndarray) -> Any:
        """An argument from the host, on the program's devices."""
        if number not in self._kinds:
            return array
        like, sharding, parts = self._kinds[number]
        if array.shape != like.shape or array.dtype != like.dtype:
            given, taken = (f"{one.dtype}{[*one.shape]}" for one in (array, like))
            raise TypeError(f"argument {number} is {given}; the program takes {taken}")
        return pxla.batched_device_put(like, sharding, [array[part] for part in parts.values()], [*parts])
