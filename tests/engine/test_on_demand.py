"""The cache of programs that tests compile on demand."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pallas_kernels
from tests.engine.on_demand import CPU_KERNELS, kernel_sources

FOLDER = Path(pallas_kernels.__file__).parent


def test_programs_depend_on_all_sources_of_a_cpus_kernels() -> None:
    files = kernel_sources(FOLDER)
    kernels = [file for pattern in CPU_KERNELS for file in FOLDER.glob(pattern)]
    assert {*files} >= {*kernels} and {file.suffix for file in kernels} == {".py", ".ll"}
    assert {FOLDER / "quantization" / f"{name}.py" for name in ("int4", "hadamard")} <= {*files}
    for file in kernels:
        if file.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            imported = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = (
                [imported, *(alias.name for alias in node.names)]
                if isinstance(node, ast.Import)
                else [imported]
            )
            for name in names:
                assert not re.match(r"jengine\b|pallas_kernels$", name), "not found by kernel_sources"
                if name.startswith("pallas_kernels."):
                    module = FOLDER.parent / name.replace(".", "/")
                    assert module.is_dir() or module.with_suffix(".py") in files
