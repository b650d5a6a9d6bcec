"""Answers over the network say which weights made their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from jengine.serving.grpc.client import Client
from jengine.spi import TokenUpdate
from tests.mocks.mock_engine import MockEngine
from tests.serving.conftest import MockServer, serve_mock

IDS, CHANGED = [5, 6, 7], "step-3"
VERSIONS = [(0, 0), (2, CHANGED)]  # of an answer with 5 tokens
ASKED = {"max_tokens": 5, "return_token_ids": True}
PATHS = {
    "/completions": {"prompt": IDS},
    "/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[MockServer]:
    """Its weights change after the second token of each answer."""
    made = MockEngine._next

    def changing(self: MockEngine, request_id: str, sequence: Any) -> TokenUpdate:
        update = made(self, request_id, sequence)
        return msgspec.structs.replace(update, version=0 if sequence.generated <= 2 else CHANGED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MockEngine, "_next", changing)
        with serve_mock(tokenizer_folder, server={"port": 0}) as server:
            yield server


@pytest.mark.parametrize("path", PATHS)
def test_http(server: MockServer, path: str) -> None:
    """With return_token_ids; complete and streamed."""
    body = {"model": "mock", **PATHS[path], **ASKED}
    [choice] = httpx.post(server.http + path, json=body, timeout=60).json()["choices"]
    expected = [[*one] for one in VERSIONS]
    assert len(choice["token_ids"]) == 5 and choice["weights_versions"] == expected
    plain = httpx.post(server.http + path, json={**body, "return_token_ids": False}, timeout=60)
    assert "weights_versions" not in plain.text

    lines = httpx.post(server.http + path, json={**body, "stream": True}, timeout=60).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"] if choice.get("token_ids")]
    tokens = 0
    for choice in choices:
        tokens += len(choice["token_ids"])
        assert choice["weights_versions"] == [one for one in expected if one[0] < tokens]
    assert tokens == 5


def test_grpc(server: MockServer) -> None:
    with Client(server.address) as client:
        whole = client.generate(IDS, max_tokens=5)
        assert whole.outputs[0].weights_versions == VERSIONS
        assert whole.outputs[0].weights_version == CHANGED
        *_, last = client.stream(IDS, max_tokens=5)
        assert last.outputs[0].weights_versions == VERSIONS
        [answer] = client.chat([{"role": "user", "content": "a"}], max_tokens=2).outputs
        assert answer.weights_versions == [(0, 0)]
        both = client.generate(IDS, max_tokens=5, n=2).outputs
        assert [one.weights_versions for one in both] == [VERSIONS, VERSIONS]
