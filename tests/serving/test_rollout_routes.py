"""What trainers call over the network: pause, sleep, new weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jengine import InvalidArgument, ModelError
from jengine.engine.operations import (
    GetPauseState,
    LoadWeights,
    Operation,
    Pause,
    PauseState,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)
from jengine.serving.grpc.client import Client
from jengine.serving.guards.security import hash_line
from tests.mocks.mock_engine import MockEngine
from tests.serving.conftest import serve_mock

ANNA, ADMIN = "a" * 32, "r" * 32


class Answers:
    """Takes the operations of a mock engine."""

    def __init__(self) -> None:
        self.asked: list[Operation[Any]] = []
        self.state = PauseState(True, True, ["kv_cache"], 3)

    def do(self, operation: Operation[Any]) -> Any:
        if isinstance(operation, GetPauseState):
            return self.state
        self.asked.append(operation)
        if isinstance(operation, LoadWeights) and operation.folder.endswith("wrong"):
            raise ModelError("is missing", file="params", tensor="embed")
        return operation.version if isinstance(operation, LoadWeights) else True


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers = Answers()
    monkeypatch.setattr(MockEngine, "do", lambda self, operation: answers.do(operation))
    return answers


@pytest.fixture
def client(tokenizer_folder: Path, tmp_path: Path, answers: Answers) -> Iterator[httpx.Client]:
    (tmp_path / "weights" / "step-3").mkdir(parents=True)
    (tmp_path / "weights" / "wrong").mkdir()
    (tmp_path / "weights" / "pipe").mkdir()
    os.mkfifo(tmp_path / "weights" / "pipe" / "model.safetensors")
    (tmp_path / "keys").write_text(f"{hash_line(ANNA, 'anna')}\n{hash_line(ADMIN, 'trainer', 'admin=1')}\n")
    options = {
        "port": 0,
        "rollout_api": True,
        "weights_folder": str(tmp_path / "weights"),
        "api_keys": str(tmp_path / "keys"),
    }
    with (
        serve_mock(tokenizer_folder, server=options) as server,
        httpx.Client(base_url=server.http[:-3], headers={"authorization": f"Bearer {ADMIN}"}) as client,
    ):
        yield client


def test_paths_are_operations(client: httpx.Client, answers: Answers) -> None:
    for path, answer, operation in (
        ("/pause", {"status": "paused"}, Pause("abort")),
        ("/pause?mode=keep", {"status": "paused"}, Pause("keep")),
        ("/resume", {"status": "resumed"}, Resume()),
        ("/sleep", {"is_sleeping": True}, Sleep()),
        ("/sleep?level=2&mode=wait&tags=weights", {"is_sleeping": True}, Sleep(2, "wait", ("weights",))),
        ("/wake_up", {"is_sleeping": True}, WakeUp()),
        ("/wake_up?tags=weights&tags=kv_cache", {"is_sleeping": True}, WakeUp(("weights", "kv_cache"))),
        ("/reset_prefix_cache", {"done": True}, ResetPrefixCache()),
    ):
        got = client.post(path)
        assert (got.status_code, got.json()) == (200, answer)
        assert answers.asked.pop() == operation and not answers.asked
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}


def test_weights_come_from_a_folder(client: httpx.Client, answers: Answers, tmp_path: Path) -> None:
    got = client.post("/update_weights", json={"path": "step-3", "version": "best", "keep_cache": True})
    assert (got.status_code, got.json()) == (200, {"version": "best"})
    assert answers.asked == [LoadWeights(str(tmp_path / "weights" / "step-3"), "best", keep_cache=True)]
    for body, message in (
        ({"path": ".."}, "path='..': must be below weights_folder"),
        ({"path": "/etc"}, "path='/etc': must be below weights_folder"),
        ({"path": "a\0b"}, "cannot be used"),
        ({"path": "a" * 5000}, "cannot be used"),
        ({"path": "pipe"}, "model.safetensors is no regular file"),
        ({"path": "step-4"}, "path='step-4': must be a folder"),
        ({"path": "wrong"}, "tensor embed: is missing"),
        ({"path": "step-3", "versions": 3}, "unknown field `versions`"),
        ({}, "missing required field `path`"),
    ):
        got = client.post("/update_weights", json=body)
        assert got.status_code == 400 and message in got.json()["error"]["message"]


def test_wrong_calls_are_named(client: httpx.Client, answers: Answers) -> None:
    for path, message in (
        ("/pause?mode=never", "mode='never': must be one of abort, wait, keep"),
        ("/pause?clear_cache=true", "clear_cache='true': is unknown here; mode may be given"),
        ("/pause?mode=keep&mode=wait", "must be given once"),
        ("/sleep?level=3", "level='3': must be 1 or 2"),
        ("/wake_up?tags=scheduling", "tags='scheduling': must be of weights, kv_cache"),
        ("/resume?now", "now='': nothing may be given"),
    ):
        got = client.post(path)
        assert got.status_code == 400 and message in got.json()["error"]["message"], path
    assert not answers.asked


def test_only_administrators(client: httpx.Client, answers: Answers) -> None:
    for key, status in ((ANNA, 403), ("x" * 32, 401)):
        for method, path in (("POST", "/pause"), ("POST", "/update_weights"), ("GET", "/is_paused")):
            got = client.request(method, path, headers={"authorization": f"Bearer {key}"}, json={"path": "x"})
            assert got.status_code == status
    assert not answers.asked


def test_without_keys_no_web_page(tokenizer_folder: Path, answers: Answers) -> None:
    options = {"port": 0, "rollout_api": True}
    with serve_mock(tokenizer_folder, server=options) as server:
        base = server.http[:-3]
        assert httpx.post(f"{base}/pause", headers={"origin": "http://localhost:3000"}).status_code == 403
        assert httpx.post(f"{base}/pause").status_code == 200
        got = httpx.post(f"{base}/update_weights", json={"path": "step-3"})
        assert "the server has no weights_folder" in got.json()["error"]["message"]
        with Client(server.address) as client:
            assert client.do("Pause", mode="keep") is True and answers.asked[-1] == Pause("keep")
            assert client.do("GetPauseState") == [True, True, ["kv_cache"], 3]
            with pytest.raises(InvalidArgument, match="must be one of GetPauseState"):
                client.do("LoadWeights", folder="/etc")


def test_off_by_default(tokenizer_folder: Path, answers: Answers) -> None:
    with serve_mock(tokenizer_folder, server={"port": 0}) as server:
        assert httpx.post(f"{server.http[:-3]}/pause").status_code == 404
        with (
            Client(server.address) as client,
            pytest.raises(InvalidArgument, match="must be one of GetTrace, "),
        ):
            client.do("Pause")
    assert not answers.asked
