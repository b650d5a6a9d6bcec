"""Agents with SmolLM2, whose chat template has no tools: requests are accepted, and conversations go on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from smollm2 import smollm2

from tests.agents.clients import CLIENTS, CODEX, Agent, Client
from tests.agents.installation import installed
from tests.agents.recorder import Recorder, recording
from tests.serving.processes import process

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
FLAGS = ["--served-model-name=mock", "--max-num-seqs=2", "--max-num-batched-tokens=256", "--grpc-port=0"]
FLAGS += ["--port=0", "--metrics-port=0", "--lame-duck-seconds=0"]
# it seldom ends by itself, and not all agents set a limit
BRIEFLY = {"max_new_tokens": 48, "temperature": 0.0}
# with all of its tools, Codex's prompt does not fit into the model's 8,192 positions
SMALL_CODEX = CODEX + "\n[features]\nmulti_agent = false\ngoals = false\n"
AGENTS = {
    "codex": replace(CLIENTS["codex"], files={".codex/config.toml": SMALL_CODEX}),
    "opencode": CLIENTS["opencode"],
    "smolagents": CLIENTS["smolagents"],
}


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    command, folder = [sys.executable, "-m", "jengine.cli"], tmp_path_factory.mktemp("smollm2") / "model"
    subprocess.run([*command, "convert", str(smollm2()), str(folder)], check=True)
    (folder / "generation_config.json").write_text(json.dumps(BRIEFLY))
    with process([*command, "serve", str(folder), *FLAGS]) as server:
        server.wait_until_ready()
        with recording(server.http) as recorder:
            yield recorder


@pytest.mark.parametrize("client", AGENTS.values(), ids=AGENTS)
def test_a_conversation(client: Client, recorder: Recorder, tmp_path: Path) -> None:
    agent = Agent(client, installed(), tmp_path / "home", recorder.url)
    recorder.take()
    shown = agent.ask("Say hello. mark-a1", "What is 2 + 2? mark-b2")
    exchanges = [exchange for exchange in recorder.take() if exchange.body]
    statuses = [(exchange.status, exchange.text[:300]) for exchange in exchanges]
    assert all(status == 200 for status, _ in statuses), statuses
    assert any("mark-a1" in text and "mark-b2" in text for text in (str(e.body) for e in exchanges)), shown
