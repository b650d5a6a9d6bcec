"""Coding agents as their users start them, against a server whose model says what it was shown.

`make test-agents` runs this. The agents come from npm and PyPI into .cache/agents, 2 GB. Each has a home of
its own, and reaches nothing but this machine.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents.clients import CLIENTS, SECONDS, Agent, interrupt
from tests.agents.installation import installed
from tests.agents.recorder import Recorder, recording
from tests.agents.templates import TEMPLATES
from tests.serving.processes import ServerProcess, mock_process
from tests.text.conftest import byte_level, write

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
CONTEXT, SMALL = 131_072, 2048  # tokens
WORDY = ("codex", "opencode", "qwen-code")  # their instructions alone do not fit into SMALL
RUNNING = re.compile(r"^jengine:num_requests_running\{.*\} (\d+)", re.MULTILINE)


@pytest.fixture(scope="session")
def folder() -> Path:
    return installed()


@contextmanager
def served(home: Path, template: str) -> Iterator[tuple[ServerProcess, Recorder]]:
    home.mkdir()
    write(byte_level(), home)
    (home / "chat_template.jinja").write_text(TEMPLATES[template])
    options: dict[str, Any] = {"tokenizer_folder": str(home), "pages": 20_000, "seconds": 0.002}
    models = [
        ("mock", {**options, "max_model_len": CONTEXT}),
        ("small", {**options, "max_model_len": SMALL}),
    ]
    engine, server = "tests.agents.scripted_engine:scripted_engine", {"port": 0, "metrics_port": 0}
    with mock_process(home, engine=engine, server=server, models=models) as process:
        process.wait_until_ready()
        with recording(process.http) as recorder:
            yield process, recorder


@pytest.fixture(scope="module", params=TEMPLATES)
def anywhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    """A server with each template."""
    with served(tmp_path_factory.mktemp("server") / "model", request.param) as (_, recorder):
        yield recorder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Recorder]]:
    with served(tmp_path_factory.mktemp("server") / "model", "qwen3") as made:
        yield made


MakeAgent = Callable[[str, Recorder], Agent]


@pytest.fixture
def make_agent(folder: Path, tmp_path: Path) -> MakeAgent:
    def make(name: str, recorder: Recorder) -> Agent:
        recorder.take()
        return Agent(CLIENTS[name], folder, tmp_path / "home", recorder.url)

    return make


def accepted(recorder: Recorder) -> None:
    """The server has rejected nothing. Agents also ask for paths that no other server has, and may leave
    before an answer.
    """
    exchanges = [exchange for exchange in recorder.take() if exchange.body]
    assert exchanges and all(exchange.status in (0, 200) for exchange in exchanges), [
        (exchange.path, exchange.status, exchange.text[:300]) for exchange in exchanges
    ]
    whole = [exchange for exchange in exchanges if not exchange.body.get("stream")]
    assert not any("event" in exchange.text[:20] for exchange in whole)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_conversation(name: str, anywhere: Recorder, make_agent: MakeAgent) -> None:
    """A question, one that needs a tool, and a third one. Each answer shows all that came before."""
    agent = make_agent(name, anywhere)
    tool = [f"CALL {json.dumps(agent.client.tool)}"] if agent.client.tool else []
    asked, marks = ["mark-a1, please.", *tool, "mark-b2, too."], ["mark-a1", *["mark-42" for _ in tool]]
    if not agent.client.turns:
        asked = [" ".join(asked[:-1])]
    else:
        marks.append("mark-b2")
    shown = agent.ask(*asked)
    assert re.search(r"seen\s+mark-a1", shown[0]), shown
    assert re.search(r"seen\s+" + r".*".join(marks), shown[-1], re.DOTALL), shown
    accepted(anywhere)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_prompt_that_is_too_long(
    name: str, server: tuple[ServerProcess, Recorder], make_agent: MakeAgent
) -> None:
    """The agent says so, as its authors meant it, and does not repeat the request again and again."""
    _, recorder = server
    agent = make_agent(name, recorder)
    [shown] = agent.ask("mark-a1" if name in WORDY else "mark-a1 " * 1000, model="small")
    assert re.search(agent.client.too_long, shown), shown
    rejected = [exchange for exchange in recorder.take() if exchange.body.get("model") == "small"]
    assert 0 < len(rejected) <= agent.client.gives_up
    assert "context_length_exceeded" in rejected[0].text


@pytest.mark.parametrize("name", CLIENTS)
def test_an_interrupt_frees_the_engine(
    name: str, server: tuple[ServerProcess, Recorder], make_agent: MakeAgent
) -> None:
    process, recorder = server
    agent = make_agent(name, recorder)
    with agent.start(["ENDLESS mark-a1, please."]) as started:
        try:
            wait_for(process, 1, started)
            interrupt(started)
            wait_for(process, 0, started)
        finally:
            started.kill()
            started.communicate()


def wait_for(process: ServerProcess, running: int, agent: subprocess.Popen[str]) -> None:
    until = time.monotonic() + SECONDS
    while True:
        text = httpx.get(process.metrics).text
        if sum(map(int, RUNNING.findall(text))) == running:
            return
        assert time.monotonic() < until, text
        assert agent.poll() is None or not running, "the agent has ended"
        time.sleep(0.2)
