"""Dependencies and extras of the distribution."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from jengine.base.errors import InvalidArgument

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OTHERS = (
    {"aot", "cuda12", "cuda13"},
    {"dev", "docs"},
    {"dynamo", "skyrl", "tunix"},
)  # devices, development, frameworks


def test_the_service_needs_no_client() -> None:
    """SDKs of clients pin each other's dependencies, so that users could not install them beside jengine."""
    sdks = {"anthropic", "instructor", "langchain_openai", "litellm", "openai"}
    extras = [lines for extra, lines in EXTRAS.items() if extra != "dev"]
    required = {
        re.split(r"[^\w-]", line)[0] for lines in (PROJECT["dependencies"], *extras) for line in lines
    }
    assert required.isdisjoint(sdks) and {"pydantic", "starlette", "uvicorn"} <= required
    for file in (ROOT / "jengine").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert sdks.isdisjoint(name.partition(".")[0] for name in names), file


def test_both_distributions_agree() -> None:
    """jengine's, and that of the kernels alone."""
    folder = ROOT / "pallas_kernels"
    kernels = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert set(kernels["dependencies"]) <= set(PROJECT["dependencies"])
    assert kernels["classifiers"] == [
        line for line in PROJECT["classifiers"] if "Console" not in line and "HTTP" not in line
    ]
    for field in ("license", "license-files", "requires-python"):
        assert kernels[field] == PROJECT[field]
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert all(kernels["optional-dependencies"][name] == EXTRAS[name] for name in ("cuda12", "cuda13"))


def test_all_names_the_extras_that_install_anywhere() -> None:
    [line] = EXTRAS["all"]
    names = set(line.removeprefix("jengine[").removesuffix("]").split(","))
    assert names == EXTRAS.keys() - {"all"}.union(*OTHERS)


def test_messages_name_extras_that_exist() -> None:
    named = set()
    for file in (ROOT / "jengine").rglob("*.py"):
        named |= set(re.findall(r"""needs_extra\([^)]*?, "(\w+)"(?:, \w+)?\)""", file.read_text()))
    assert len(named) > 4 and named <= EXTRAS.keys()
    error = InvalidArgument.needs_extra("page_size", 16, "ray", ImportError("No module named 'ray'"))
    assert str(error) == "page_size=16: needs pip install 'jengine[ray]' (No module named 'ray')"
