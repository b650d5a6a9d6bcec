"""XLA's options for tests, and what it compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import pytest
from jax._src import compilation_cache

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


def save_compilations(folder: Path) -> None:
    """From now on, what this process compiles outside of `Lowered.compile` is saved in the folder, from which
    later processes load it.

    Programs that are compiled ahead are not: tests read what XLA says of these and save them themselves.
    """
    ahead = ContextVar("ahead", default=False)
    compile_ahead, is_used = jax.stages.Lowered.compile, compilation_cache.is_cache_used

    def compile_without(*args: Any, **how: Any) -> jax.stages.Compiled:
        token = ahead.set(True)
        try:
            return compile_ahead(*args, **how)
        finally:
            ahead.reset(token)

    compilation_cache.reset_cache()  # collection may have asked for one
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    setattr(jax.stages.Lowered, "compile", compile_without)  # noqa: B010
    setattr(compilation_cache, "is_cache_used", lambda backend: not ahead.get() and is_used(backend))  # noqa: B010


def compiled_with_thunks(
    lowered: jax.stages.Lowered, options: CompilerOptions | None = None
) -> tuple[jax.stages.Compiled, tuple[Thunk, ...]]:
    """Compiles a program that is lowered for a GPU. Returns it and its launches."""
    with TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={**(options or {}), **dumping(Path(folder))})
        [thunks] = dumped(Path(folder)).values()
        return compiled, thunks
