"""Responses that the server keeps: what later requests may say of them, and what bounds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from jengine import InvalidArgument
from jengine.serving.config import ServerConfig
from jengine.serving.guards.security import Key, current_key, hash_line
from jengine.serving.http.responses import earlier as store_module
from jengine.serving.http.responses.earlier import MAX_RESPONSES, MAX_SECONDS, ResponseStore, StoredResponse
from tests.serving.conftest import MockServer, serve_mock
from tests.serving.echo import echo_model
from tests.serving.test_http_responses import THOUGHT, asked, events, post, raw
from tests.serving.test_http_tools import END

FORGETS = "This server keeps no responses"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return echo_model(tmp_path_factory.mktemp("echo"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[MockServer]:
    with serve_mock(folder, server={"port": 0}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: MockServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.http, api_key="none", max_retries=0, timeout=60) as client:
        yield client


# --- the store alone ------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(name: str, size: int = 100) -> StoredResponse:
    return StoredResponse(name, b"a" * (size - 2), b"[]", (f"item of {name}",))


def kept(store: ResponseStore, *names: str) -> list[str]:
    return [name for name in names if store.get(name) is not None]


@pytest.fixture(autouse=True)
def no_key() -> Iterator[None]:
    token = current_key.set(None)
    yield
    current_key.reset(token)


def test_bytes_are_bounded() -> None:
    store = ResponseStore(250)
    for name in "abc":
        store.put(stored(name))
    assert kept(store, "a", "b", "c") == ["b", "c"]
    store.get("b")
    store.put(stored("d"))
    assert kept(store, "b", "c", "d") == ["b", "d"], "the one that was used last stays"
    store.put(stored("e", 251))
    assert kept(store, "b", "d", "e") == ["b", "d"], "what can never fit takes no room"
    store.put(stored("b", 150))
    assert kept(store, "b", "d") == ["b", "d"], "one with the same id replaces it"
    assert store.with_item("item of a") is None
    found = store.with_item("item of d")
    assert found is not None and found.id == "d"
    assert store.remove("d") and not store.remove("d") and store.with_item("item of d") is None


def test_count_and_age_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 2)
    clock = Clock()
    store = ResponseStore(10_000, clock)
    for name in "abc":
        store.put(stored(name))
    assert kept(store, "a", "b", "c") == ["b", "c"]
    clock.now = MAX_SECONDS
    store.get("c")
    clock.now += 1
    assert kept(store, "b", "c") == ["c"]


def test_each_key_has_its_own() -> None:
    store = ResponseStore(350)
    current_key.set(Key("quiet"))
    store.put(stored("a"))
    current_key.set(Key("loud"))
    assert store.get("a") is None and store.with_item("item of a") is None and not store.remove("a")
    for name in "abcd":
        store.put(stored(name))
    assert kept(store, "a", "b", "c", "d") == ["c", "d"], "the key with the most bytes makes room"
    current_key.set(Key("quiet"))
    assert kept(store, "a") == ["a"]


def test_the_option() -> None:
    for value in (-1, 1.5, None, True):
        with pytest.raises(InvalidArgument, match="response_store_bytes"):
            ServerConfig(grpc_port=0, response_store_bytes=value)  # type: ignore[arg-type]
    assert not ResponseStore(ServerConfig(grpc_port=0, response_store_bytes=0).response_store_bytes).on
    page = " ".join((Path(__file__).parents[2] / "docs/service/http.md").read_text().split())
    assert f"at most {MAX_RESPONSES:,} responses" in page and "six hours after its last use" in page
    assert MAX_SECONDS == 6 * 3600


# --- over HTTP ------------------------------------------------------------------------------------


def test_a_response_goes_on(client: OpenAI, server: MockServer) -> None:
    """The template shows all messages, so the next answer begins with the earlier ones."""
    first = client.responses.create(**asked("One."), instructions="Secret.")
    assert first.output_text == "Secret.One."
    second = client.responses.create(**asked("Two."), previous_response_id=first.id)
    assert second.output_text == "One." and second.previous_response_id == first.id
    third = client.responses.create(
        model="mock", input=f"Three.{END}", previous_response_id=first.id, max_output_tokens=500
    )
    assert third.output_text.startswith(f"One.{END}Secret.One.Three.{END}"), third.output_text
    counted = client.responses.input_tokens.count(
        model="mock", input=f"Three.{END}", previous_response_id=first.id
    )
    assert third.usage is not None and counted.input_tokens == third.usage.input_tokens
    body = raw(asked("", input="Three.", previous_response_id=third.id, extra_body={}))
    assert events(server, **body)[-1]["response"]["usage"]["input_tokens"] > counted.input_tokens


def test_references_to_items(server: MockServer) -> None:
    """As the AI SDK sends its second turn, also after a stream."""
    for make in (
        lambda body: post(server, **body).json(),
        lambda body: events(server, **body)[-1]["response"],
    ):
        first = make(raw(asked(THOUGHT + "One.")))
        assert [item["type"] for item in first["output"]] == ["reasoning", "message"]
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        del references[0]["type"]
        items = [{"role": "user", "content": "a"}, *references, {"role": "user", "content": "b" + END}]
        answer = post(server, **{**raw(asked("")), "input": items}).json()
        assert answer["output"][0]["content"][0]["text"] == "aOne.b", answer
    items[1]["id"] = "rs_1"
    wrong = post(server, **{**raw(asked("")), "input": items})
    assert wrong.status_code == 404 and wrong.json()["error"]["param"] == "input"
    assert "store=false" in wrong.json()["error"]["message"]
    wrong = post(server, input=[references[1], {"type": "item_reference", "id": []}])
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "input[1].id", wrong.text


def test_what_is_kept_can_be_read_and_deleted(client: OpenAI, server: MockServer) -> None:
    content = [{"type": "input_text", "text": "b" + END}]
    items: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "c"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "d"},
        {"role": "user", "content": content, "id": "msg_x"},
    ]
    made = client.responses.create(**asked("", input=items))
    assert client.responses.retrieve(made.id) == made
    url = f"{server.http}/responses/{made.id}"
    assert httpx.get(f"{url}?stream=true", timeout=60).status_code == 400
    assert httpx.delete(url, timeout=60).json() == {"id": made.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)


def test_an_unknown_response(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(**asked("a"), previous_response_id="resp_1")
    assert (wrong.value.code, wrong.value.param) == ("previous_response_not_found", "previous_response_id")
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="resp_1"):
            ask("resp_1")


def test_what_is_not_kept(client: OpenAI, server: MockServer) -> None:
    made = client.responses.create(**asked("a", store=False))
    assert made.store is False
    failed = post(server, input="a", max_output_tokens=0)
    assert failed.status_code == 400
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_conversations_that_are_too_large(folder: Path) -> None:
    with serve_mock(folder, server={"port": 0, "max_message_bytes": 1500}) as server:
        body: dict[str, Any] = {"max_output_tokens": 1, "input": [{"role": "user", "content": "a" * 700}]}
        first = post(server, **body).json()
        wrong = post(server, **body, previous_response_id=first["id"])
        assert wrong.status_code == 413 and "max_message_bytes" in wrong.json()["error"]["message"]


def test_a_server_that_keeps_nothing(folder: Path) -> None:
    with serve_mock(folder, server={"port": 0, "response_store_bytes": 0}) as server:
        made = post(server, **raw(asked("Hello."))).json()
        assert made["status"] == "completed" and made["store"] is False
        wrong = [
            post(server, input="a", store=True),
            post(server, input="a", previous_response_id=made["id"]),
            post(server, input=[{"type": "item_reference", "id": made["output"][0]["id"]}]),
        ]
        assert [answer.status_code for answer in wrong] == [400, 400, 404]
        assert [answer.json()["error"]["param"] for answer in wrong] == [
            "store",
            "previous_response_id",
            "input",
        ]
        for answer in wrong[1:]:
            assert "store=false" in answer.json()["error"]["message"]
        found = httpx.get(f"{server.http}/responses/{made['id']}", timeout=60)
        assert found.status_code == 404 and FORGETS in found.json()["error"]["message"]


def test_keys_do_not_see_each_other(folder: Path, tmp_path: Path) -> None:
    keys = {name: f"{name}-" + "0123456789" * 3 for name in ("alice", "bob")}
    file = tmp_path / "keys"
    file.write_text("".join(hash_line(key, name) + "\n" for name, key in keys.items()))
    with serve_mock(folder, server={"port": 0, "api_keys": file}) as server:

        def client(name: str) -> OpenAI:
            return OpenAI(base_url=server.http, api_key=keys[name], max_retries=0, timeout=60)

        with client("alice") as alice, client("bob") as bob:
            made = alice.responses.create(**asked("Hello."))
            assert alice.responses.retrieve(made.id).output_text == "Hello."
            for ask in (bob.responses.retrieve, bob.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    ask(made.id)
            with pytest.raises(openai.BadRequestError):
                bob.responses.create(**asked("a"), previous_response_id=made.id)
            reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
            with pytest.raises(openai.NotFoundError):
                bob.responses.create(**asked("", input=reference))
