"""XLA's options in tests."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jengine.execution.programs import CompilerOptions
from tests.compiling import OPTIMIZED, optimized


def objects(folder: Path, options: CompilerOptions) -> set[bytes]:
    """The machine code that XLA writes for a function."""

    def run(x: jax.Array) -> jax.Array:
        return jnp.exp(x @ x.T).sum(0) * jnp.tanh(x[:, :1])

    lowered = jax.jit(run).lower(np.ones((40, 33), np.float32))
    lowered.compile(compiler_options={**options, "xla_dump_to": str(folder)})
    return {file.read_bytes() for file in folder.glob("*.o")}


def test_optimized_code_is_what_users_have(tmp_path: Path) -> None:
    few, asked = objects(tmp_path / "few", {}), objects(tmp_path / "asked", OPTIMIZED)
    with optimized():
        usual = objects(tmp_path / "usual", {})
    assert usual == asked != few and usual
