"""The commands that install an extra's packages."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from jengine.base import extras
from jengine.base.errors import InvalidArgument

REQUIRES = [
    "jax>=0.11",
    "numpy>=2; extra == 'plots'",
    'pillow; extra == "plots"',
    "jengine[plots]; extra == 'ray'",
    "ray[data]; extra == 'ray'",
    "plugin>=1; (sys_platform == 'linux') and extra == 'aot'",
]


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ("plots", "pip install 'numpy>=2' pillow"),
        ("ray", "pip install 'numpy>=2' pillow 'ray[data]'"),
        ("aot", "pip install 'plugin>=1'"),
        ("unknown", "pip install '.[unknown]' in jengine's checkout"),
    ],
)
def test_the_line_names_the_packages(extra: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "requires", lambda _: REQUIRES)
    assert extras.install_line(extra) == line


def test_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(_: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(extras, "requires", requires)
    assert extras.install_line("ray") == "pip install '.[ray]' in jengine's checkout"


def test_the_service_needs_no_client() -> None:
    """SDKs of clients pin each other's dependencies, so that users could not install them beside jengine."""
    sdks = {"anthropic", "instructor", "langchain_openai", "litellm", "openai"}
    folder = Path(__file__).parent.parent
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = [lines for extra, lines in project["optional-dependencies"].items() if extra != "dev"]
    required = {
        re.split(r"[^\w-]", line)[0] for lines in (project["dependencies"], *extras) for line in lines
    }
    assert required.isdisjoint(sdks) and {"pydantic", "starlette", "uvicorn"} <= required
    for file in (folder / "jengine").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert sdks.isdisjoint(name.partition(".")[0] for name in names), file


def test_no_message_names_a_project_that_does_not_exist() -> None:
    known = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in known:
        line = extras.install_line(extra)
        assert line.startswith("pip install ") and "jengine[" not in line
    error = InvalidArgument.needs_extra("page_size", 16, "ray", ImportError("No module named 'ray'"))
    assert str(error).startswith("page_size=16: needs pip install ") and str(error).endswith(
        "(No module named 'ray')"
    )
