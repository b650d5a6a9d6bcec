"""The cache of programs that tests compile on demand."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pallas_kernels
from tests.engine.on_demand import kernel_sources

FOLDER = Path(pallas_kernels.__file__).parent


def test_programs_depend_on_all_sources_of_a_cpus_kernels() -> None:
    files = kernel_sources(FOLDER)
    assert {*files} >= {file for file in (FOLDER / "cpu").iterdir() if file.suffix in (".py", ".ll")}
    assert {FOLDER / "int4.py", FOLDER / "hadamard.py"} <= {*files} and all(file.exists() for file in files)
    for file in (FOLDER / "cpu").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            imported = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = (
                [imported, *(alias.name for alias in node.names)]
                if isinstance(node, ast.Import)
                else [imported]
            )
            for name in names:
                assert not re.match(r"jengine\b|pallas_kernels$", name), "not found by kernel_sources"
                if re.match(r"pallas_kernels\.(?!cpu\b)", name):
                    assert FOLDER.parent / (name.replace(".", "/") + ".py") in files
