"""XLA's options for tests, and what it compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import pytest

from jengine.execution.programs import CompilerOptions
from tests.execution.thunks import Thunk, dumped, dumping

# With 1, XLA optimizes little: a compilation takes 60 % of the time and has the same operations, fusions and
# buffers, but slower code. conftest.py sets it for the run and the processes that tests start.
FEW_OPTIMIZATIONS = "JAX_DISABLE_MOST_OPTIMIZATIONS"
# of a program whose optimized code matters, as where bits are compared across programs
OPTIMIZED: CompilerOptions = {
    "xla_backend_optimization_level": "3",
    "xla_llvm_disable_expensive_passes": False,
}


@contextmanager
def optimized() -> Iterator[None]:
    """XLA compiles with its usual optimizations here and in processes that start here."""
    before = jax.config.read("jax_disable_most_optimizations")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FEW_OPTIMIZATIONS, "0")
        jax.config.update("jax_disable_most_optimizations", False)
        jax.clear_caches()
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)
            jax.clear_caches()


def compiled_with_thunks(
    lowered: jax.stages.Lowered, options: CompilerOptions | None = None
) -> tuple[jax.stages.Compiled, tuple[Thunk, ...]]:
    """Compiles a program that is lowered for a GPU. Returns it and its launches."""
    with TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={**(options or {}), **dumping(Path(folder))})
        [thunks] = dumped(Path(folder)).values()
        return compiled, thunks
