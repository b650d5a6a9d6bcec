"""Modules of extras. `make test` installs `dev` and `aot`, so there a test that lacks one fails; elsewhere it
is skipped.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

INSTALLED = "TEST_EXTRAS"  # names of extras with commas between them; the Makefile sets it


def of_extra(extra: str, module: str) -> Any:
    """The module.

    Raises:
        ModuleNotFoundError: it is missing although the extra is installed.
    """
    if extra in os.environ.get(INSTALLED, "").split(","):
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"needs the extra {extra}: pip install '.[{extra}]'")


def compiler_for_gpus() -> None:
    """For tests that compile for GPUs that are not there."""
    of_extra("aot", "jax_plugins.xla_cuda13")
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        pytest.skip(
            "needs JAX_PLATFORMS=cpu: the plugin looks for all of CUDA otherwise", allow_module_level=True
        )
