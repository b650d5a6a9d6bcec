"""Clients of others, against a server process: packages with which agents are made, with a model that repeats
its prompt, and nine libraries with SmolLM2. OpenAI's and Anthropic's own clients are also used in the other
tests of HTTP.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from smollm2 import smollm2

from tests.serving.processes import mock_process, process
from tests.text.conftest import byte_level, write

FOLDER = Path(__file__).parent / "clients"
# The last message's own words; the comment tells the format.
ECHO = "{# <tool_call> </think> #}{% if enable_thinking or tools %}{% endif %}{{ reasoning_effort }}"
ECHO += "{{ messages[-1].content }}"

# half a gigabyte, with versions that jengine's own environment need not have
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of an environment with these packages: a new one, unless CLIENTS_PYTHON names it."""
    if found := os.environ.get("CLIENTS_PYTHON"):
        return Path(found)
    home = tmp_path_factory.mktemp("clients") / "venv"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    made: Path = home / "bin" / "python"
    install = [made, "-m", "pip", "--quiet", "install", "-r", FOLDER / "requirements.txt"]
    subprocess.run(install, check=True, env=clean())
    return made


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = write(byte_level(), tmp_path_factory.mktemp("echo"))
    (folder / "chat_template.jinja").write_text(ECHO)
    engine = "tests.serving.stopping_engine:mock_engine"
    with mock_process(folder, engine=engine, server={"port": 0}) as server:
        server.wait_until_ready()
        yield server.http


def clean() -> dict[str, str]:
    """The environment, without what belongs to this one."""
    own = ("PYTHON", "VIRTUAL_ENV", "PIP_CONSTRAINT", "OPENAI", "ANTHROPIC", "COVERAGE")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}


@pytest.mark.parametrize("script", ["langchain.py", "litellm_calls.py", "openai_agents.py"])
def test_agents_and_tools(script: str, python: Path, url: str) -> None:
    done = subprocess.run([python, FOLDER / script, url], env=clean(), capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"


def test_clients_with_a_small_model(python: Path) -> None:
    """The list in docs/service/http.md. The model's chat template has no tools."""
    command = [sys.executable, "-m", "jengine.cli", "serve", str(smollm2()), "--served-model-name=smol"]
    ports = ["--port=0", "--grpc-port=0", "--metrics-port=0", "--max-num-seqs=2", "--lame-duck-seconds=0"]
    with process([*command, *ports]) as server:
        server.wait_until_ready()
        words = [python, FOLDER / "cells.py", server.http, "smol"]
        done = subprocess.run(words, env=clean(), capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
