"""What answers over HTTP say of tokens, and what bodies may be: offsets, bytes, chunks, encodings."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend

from tests.serving.conftest import TEMPLATE, MockServer, serve_mock
from tests.text.conftest import byte_fallback, byte_level, write

TEXT = "The fox 😀é中 ends</s> here"


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockServer]:
    backend: Backend = request.param()
    folder: Path = write(backend, tmp_path_factory.mktemp("tokenizer"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serve_mock(folder, server={"port": 0}, vocab_size=backend.get_vocab_size()) as server:
        yield server


def post(server: MockServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.http}{path}", json={"model": "mock", **body}, timeout=60)


def events(server: MockServer, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = post(server, path, **body, stream=True).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("given", ["text", "ids"])
def test_offsets_are_those_of_the_text(echo: bool, given: str, server: MockServer) -> None:
    """Tokens that are parts of a character, or that do not show, count as what they add to the text."""
    tokenizer = server.llm.tokenizer
    ids = tokenizer.encode(TEXT)
    count = len(ids)
    prompt = TEXT.replace("</s>", "") if given == "text" else ids
    body = {"prompt": prompt, "max_tokens": count, "echo": echo, "logprobs": 1}
    [choice] = post(server, "/completions", **body).json()["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["text_offset"])
    shown = 0
    for token, at in zip(found["tokens"], found["text_offset"], strict=True):
        if token not in ("<s>", "</s>") and "\ufffd" not in token:
            assert choice["text"][at:].lstrip().startswith(token.lstrip()), (token, at)
            shown += 1
    assert shown > 5 and found["text_offset"] == sorted(found["text_offset"])
    pieces = [event["choices"][0]["logprobs"] for event in events(server, "/completions", **body)]
    assert [at for piece in pieces for at in piece["text_offset"]] == found["text_offset"]


def test_bytes_of_a_conversations_tokens(server: MockServer) -> None:
    """The mock engine repeats the prompt."""
    template = "{{ messages[0].content }}"
    ids = server.llm.tokenizer.encode("The fox 😀é中 ends", add_special_tokens=False)
    body = {
        "messages": [{"role": "user", "content": "The fox 😀é中 ends"}],
        "chat_template": template,
        "max_tokens": len(ids),
        "logprobs": True,
        "top_logprobs": 1,
    }
    with serve_mock(
        server.llm.tokenizer.folder,  # type: ignore[arg-type]
        server={"port": 0, "client_chat_templates": True},
        vocab_size=server.engine.limits.vocab_size,
    ) as other:
        [choice] = post(other, "/chat/completions", **body).json()["choices"]
        content = choice["logprobs"]["content"]
        assert b"".join(bytes(one["bytes"]) for one in content).decode().strip() == "The fox 😀é中 ends"
        assert all(one["top_logprobs"][0]["bytes"] == one["bytes"] for one in content)
        assert any("\ufffd" in one["token"] for one in content), "some are parts of characters"


@pytest.mark.parametrize(
    "path, body",
    [
        ("/completions", {"prompt": ["The fox", "a"], "n": 2, "max_tokens": 5}),
        (
            "/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "n": 3,
                "max_tokens": 5,
                "return_token_ids": True,
            },
        ),
    ],
)
def test_an_event_has_one_choice(path: str, body: dict[str, Any], server: MockServer) -> None:
    """Many clients read only the first. Usage is null before the last event, as in OpenAI's API."""
    *chunks, last = events(server, path, **body, stream_options={"include_usage": True})
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * len(chunks) and last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks) and last["usage"]["completion_tokens"] > 0
    if path == "/chat/completions":
        assert sum("prompt_token_ids" in chunk for chunk in chunks) == 1
    assert not any("usage" in chunk for chunk in events(server, path, **body))


def test_fields_without_effect(server: MockServer) -> None:
    fields = {
        "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto",
        "store": False, "user": "u",
    }  # fmt: skip
    for path, body in (
        ("/completions", {"prompt": "a"}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        assert post(server, path, **body, **fields, max_tokens=1).status_code == 200


def test_an_empty_prompt(server: MockServer) -> None:
    """The tokenizer makes a token of it."""
    answer = post(server, "/completions", prompt="", max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == 1


def send(server: MockServer, raw: bytes, **headers: str) -> tuple[int, str]:
    headers = {"content-type": "application/json", **headers}
    answer = httpx.post(f"{server.http}/completions", content=raw, headers=headers, timeout=60)
    return answer.status_code, answer.json().get("error", {}).get("message", "")


BODY = b'{"model": "mock", "prompt": "x", "max_tokens": 1}'


def test_bodies(server: MockServer) -> None:
    assert send(server, b"\xef\xbb\xbf" + BODY)[0] == 200, "a byte order mark"
    status, why = send(server, BODY[:-1] + b', "temperature": 1e999}')
    assert status == 400 and why.startswith("temperature=") and "out of range" in why
    status, why = send(server, gzip.compress(BODY), **{"content-encoding": "gzip"})
    assert status == 415 and why == "content-encoding must be identity, not gzip"
    assert send(server, BODY, **{"content-encoding": "identity"})[0] == 200
    assert send(server, b"[1]") == (400, "the body must be a JSON object")
