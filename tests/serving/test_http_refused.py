"""Requests that the API refuses, with the name of the field and its limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from jengine import SamplingParams
from jengine.serving.http.bodies import CHAT, COMPLETION, IGNORED
from jengine.serving.http.calls import BadBody, json_object
from tests.serving.conftest import MockServer

TEXT = "The quick brown fox"
HELLO: list[Any] = [{"role": "user", "content": TEXT}]
HTTP = {"port": 0}
JSON = {"content-type": "application/json; charset=utf-8"}


@pytest.fixture(scope="module")
def server(tokenizer_folder: Any) -> Iterator[MockServer]:
    from tests.serving.conftest import serve_mock

    with serve_mock(tokenizer_folder, server=HTTP) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: MockServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.http, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def plain(server: MockServer) -> Iterator[httpx.Client]:
    """For requests that OpenAI's client has no method for."""
    with httpx.Client(base_url=server.http.removesuffix("/v1"), timeout=60) as client:
        yield client


def prompt_ids(server: MockServer, text: str = TEXT) -> list[int]:
    return server.llm.tokenizer.encode(text)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"temperature": "warm"}, "temperature", "finite number"),
    ({"n": 65}, "n", "64"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", "differs"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs=true"),
    ({"logprobs": 3}, "logprobs", "boolean"),
    ({"logit_bias": {"600": 1}}, "logit_bias", "[0, 501)"),
    ({"stop": [""]}, "stop", "at least one character"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "not permitted"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hello"}, "messages", "must be a list"),
    ({"messages": [{"role": "poet", "content": ""}]}, "messages[0].role", "must be one of"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url",
        "this model, or this engine, reads no images",
    ),
    ({"messages": [{"role": "user", "content": "x"}] * 5000}, "messages", "at most 4096"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "required",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"response_format": {}}, "response_format.type", "required"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "structured_outputs already constrains the output",
    ),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": "x"}, "structured_outputs", "must be an object"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs", "llguidance"),
    ({"structured_outputs": {"grammar": "root ::= word"}}, "structured_outputs", "Rule 'word' not found"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "structured_outputs"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}},
        "response_format",
        "llguidance",
    ),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
    ({"chat_template_kwargs": {"a": "x" * 2**20}}, "chat_template_kwargs", "at most 1048576"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "does not accept templates"),
    ({"audio": {"voice": "x"}}, "audio", "writes no audio"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"modalities": ["audio"]}, "modalities", "does not support"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"no such": 1}, "no such", "no such field"),
    ({"priority": 1.5}, "priority", "integer"),
    ({"timeout": -1}, "timeout", "at least 0"),
    ({"ttft_ms": -1.0}, "ttft_ms", ""),
    ({"cache_salt": ""}, "cache_salt", "1 to 256"),
]


@pytest.mark.parametrize("fields, param, limit", BAD, ids=[str(case[0])[:40] for case in BAD])
def test_what_is_wrong_is_named(plain: httpx.Client, fields: dict[str, Any], param: str, limit: str) -> None:
    answer = plain.post("/v1/chat/completions", json={"model": "mock", "messages": HELLO, **fields})
    error = answer.json().get("error", answer.json())
    assert (answer.status_code, error.get("param"), error.get("type")) == (
        400,
        param,
        "invalid_request_error",
    ), error
    assert limit in error["message"]


def test_completions_take_no_embeddings(plain: httpx.Client) -> None:
    answer = plain.post("/v1/completions", json={"model": "mock", "prompt": "x", "prompt_embeds": "UEsDBA=="})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_embeds", answer.text
    assert "this server does not support it" in answer.json()["error"]["message"]


def test_more_tokens_than_there_is_room_for_are_cut(plain: httpx.Client) -> None:
    answer = plain.post(
        "/v1/chat/completions", json={"model": "mock", "messages": HELLO, "max_tokens": 10**30}
    )
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "length", answer.text


def test_an_effort_that_the_template_does_not_use(plain: httpx.Client) -> None:
    """SDKs and agents send it to every model."""
    answer = plain.post(
        "/v1/chat/completions", json={"model": "mock", "messages": HELLO, "reasoning_effort": "high"}
    )
    assert answer.status_code == 200, answer.text


NO_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt"), ([], "prompt"), ([[]], "prompt"), ([1.5], "prompt[0]"),
    ({"a": 1}, "prompt"), ([501], "prompt"),
    ([1] * 2000, "prompt"), (["a"] * 300, "prompt"), ([70, "a"], "prompt"), ([True], "prompt[0]"),
]  # fmt: skip


@pytest.mark.parametrize("prompt, param", NO_PROMPTS)
def test_prompts_that_are_none(plain: httpx.Client, prompt: Any, param: str) -> None:
    answer = plain.post("/v1/completions", json={"model": "mock", "prompt": prompt, "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_another_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as wrong:
        client.completions.create(model="gpt", prompt=TEXT)
    assert wrong.value.code == "model_not_found" and wrong.value.param == "model"


@pytest.mark.parametrize("request_id", ["a b", "\r\nSet-Cookie: x=y", "世界", "x" * 250])
def test_request_ids_that_no_header_can_hold(client: OpenAI, request_id: str) -> None:
    answer = client.completions.create(
        model="mock", prompt=TEXT, max_tokens=1, extra_body={"request_id": request_id}
    )
    assert answer.id == f"cmpl-{request_id}" and answer._request_id is None


def test_what_clients_always_send_is_taken(plain: httpx.Client) -> None:
    """null is the same as an absent field."""
    extra = {name: "x" for name in IGNORED} | {
        "store": True,
        "metadata": {"a": "b"},
        "suffix": None,
        "seed": None,
        "modalities": ["text"],
    }
    assert (
        plain.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2, **extra}).status_code
        == 200
    )


def test_every_sampling_parameter_is_a_field() -> None:
    for form in (CHAT, COMPLETION):
        assert form._sampling | {"logprobs", "output_kind"} == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("path", ["/nowhere", "/v1/embedding", "/v1/chat"])
def test_paths_that_there_are_not(plain: httpx.Client, path: str) -> None:
    answer = plain.post(path, json={})
    assert answer.status_code == 404 and path in answer.json()["error"]["message"]
    assert plain.get("/v1/completions").status_code == 405 and plain.get("/v1/completions").json()["error"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"prompt": "\\ud800"}', b"{}" * 10]
)
def test_bodies_that_are_no_json(plain: httpx.Client, body: bytes) -> None:
    answer = plain.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_what_a_web_page_can_send_unasked_is_refused(plain: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = plain.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]


def test_bodies_of_too_many_parts(plain: httpx.Client) -> None:
    body = b'{"prompt": [' + b",".join([b"[]"] * 200_000) + b"]}"
    answer = plain.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400 and "at most 131072" in answer.json()["error"]["message"]


@pytest.mark.parametrize("ending", ['"', '\\"', "\\\\"])
def test_brackets_in_strings_are_no_parts(ending: str) -> None:
    """Strings and escapes may cross any border between pieces that are counted."""
    texts = ["[1,2],{" * 80 + ending] * 2000
    assert json_object(json.dumps({"input": texts}).encode()) == {"input": texts}
    with pytest.raises(BadBody, match="has 131074 arrays and objects; at most 131072"):
        json_object(json.dumps({"input": [*texts, *[[]] * (2**17)]}).encode())
