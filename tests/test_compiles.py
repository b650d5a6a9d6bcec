"""Compilations are counted, those of callers apart from the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

import jengine
from jengine.base.compiles import announced, compile_count, engine_compile_count


def test_a_callers_own_functions_are_not_the_engines() -> None:
    before, of_engine = compile_count(), engine_compile_count()
    jax.jit(lambda x: x + 17.125)(1.0)
    assert (compile_count() - before, engine_compile_count() - of_engine) == (1, 0)
    scope: dict[str, Any] = {}
    exec(
        compile("def call(function): return function(2.0)", Path(jengine.__file__).parent / "any.py", "exec"),
        scope,
    )
    scope["call"](jax.jit(lambda x: x * 3.75))
    assert (compile_count() - before, engine_compile_count() - of_engine) == (2, 1)
    with announced():
        scope["call"](jax.jit(lambda x: x * 4.75))
    assert (compile_count() - before, engine_compile_count() - of_engine) == (2, 1)
