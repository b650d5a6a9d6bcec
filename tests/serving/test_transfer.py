"""vLLM's kv_transfer_params: a router lets one server compute a prompt, and another answer it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jengine import InvalidArgument
from jengine.serving.calls.model_provider import NO_PAGES, PagesInfo
from jengine.serving.requests.transfer import answer_of, pages_from
from tests.serving.conftest import MockServer, serve_mock

PRODUCER = PagesInfo("10.0.0.1:14579", (), "p")
CONSUMER = PagesInfo(None, ("10.0.0.1:14579", "10.0.0.2:*"))


def test_what_a_producer_says_a_consumer_understands() -> None:
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
    assert pages_from(asked, PRODUCER) is None
    answer = answer_of(asked, PRODUCER)
    assert answer == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_block_ids": [],
        "remote_host": "10.0.0.1", "remote_port": 14579,
    }  # fmt: skip
    assert pages_from(answer, CONSUMER) == "10.0.0.1:14579" and answer_of(answer, CONSUMER) is None
    assert pages_from({**answer, "remote_host": "10.0.0.2", "remote_port": "9"}, CONSUMER) == "10.0.0.2:9"
    for info in (PRODUCER, CONSUMER, NO_PAGES):
        assert pages_from(None, info) is pages_from({}, info) is answer_of(None, info) is None


@pytest.mark.parametrize(
    ("given", "info", "message"),
    [
        ({"do_remote_decode": True}, CONSUMER, "needs an engine with kv_connector=sockets and kv_role"),
        (
            {"do_remote_decode": True, "do_remote_prefill": True},
            PRODUCER,
            "must be false with do_remote_prefi",
        ),
        ({"do_remote_decode": 1}, PRODUCER, "must be true or false"),
        ({"do_remote_prefill": True}, CONSUMER, "needs remote_host and remote_port"),
        (
            {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80},
            CONSUMER,
            "is none of the peers",
        ),
        (
            {"do_remote_prefill": True, "remote_host": "10.0.0.2", "remote_port": 99999},
            CONSUMER,
            "must be from 1 to 65535",
        ),
        (
            {"do_remote_prefill": True, "remote_host": "10.0.0.2", "remote_port": "0"},
            CONSUMER,
            "must be from 1 to 65535",
        ),
        (
            {"do_remote_prefill": True, "remote_host": "10.0.0.2", "remote_port": "²"},
            CONSUMER,
            "needs remote_host and remote_port",
        ),
        ({"remote_hosts": "x"}, CONSUMER, "unknown; known: do_remote_decode"),
    ],
)
def test_what_a_server_cannot_do_is_refused(given: dict[str, Any], info: PagesInfo, message: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^kv_transfer_params\.\w+=.*{message}"):
        pages_from(given, info)


@pytest.fixture(scope="module")
def server(tokenizer_folder: Any) -> Iterator[MockServer]:
    pages = PRODUCER._replace(peers=CONSUMER.peers)
    with serve_mock(tokenizer_folder, server={"port": 0}, exchange=pages) as server:
        yield server


def test_over_http(server: MockServer) -> None:
    decode = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "The quick brown fox"},
        "chat/completions": {"messages": [{"role": "user", "content": "The quick brown fox"}]},
    }
    with httpx.Client(base_url=server.http, timeout=60) as client:
        for path, body in bodies.items():
            answer = client.post(path, json={**body, **decode}).json()
            assert answer["kv_transfer_params"]["remote_port"] == 14579, answer
            more = {"kv_transfer_params": answer["kv_transfer_params"], "max_tokens": 3}
            answer = client.post(path, json={**body, **more}).json()
            assert answer["choices"] and "kv_transfer_params" not in answer
            refused = client.post(path, json={**body, **decode, "stream": True})
            assert refused.status_code == 400 and "needs stream=false" in refused.text
            more["kv_transfer_params"]["remote_port"] = 22
            refused = client.post(path, json={**body, **more})
            assert refused.status_code == 400 and "is none of the peers" in refused.text
