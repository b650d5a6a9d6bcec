"""The commands that install an extra's packages."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from jengine.base import extras
from jengine.base.errors import InvalidArgument

REQUIRES = [
    "jax>=0.11",
    "starlette>=1.0; extra == 'http'",
    'uvicorn; extra == "http"',
    "jengine[http]; extra == 'ray'",
    "ray[data]; extra == 'ray'",
    "plugin>=1; (sys_platform == 'linux') and extra == 'aot'",
]


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ("http", "pip install 'starlette>=1.0' uvicorn"),
        ("ray", "pip install 'starlette>=1.0' uvicorn 'ray[data]'"),
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
    assert extras.install_line("http") == "pip install '.[http]' in jengine's checkout"


def test_no_message_names_a_project_that_does_not_exist() -> None:
    known = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in known:
        line = extras.install_line(extra)
        assert line.startswith("pip install ") and "jengine[" not in line
    error = InvalidArgument.needs_extra("http_port", 8000, "http", ImportError("No module named 'uvicorn'"))
    assert str(error).startswith("http_port=8000: needs pip install ") and str(error).endswith(
        "(No module named 'uvicorn')"
    )
