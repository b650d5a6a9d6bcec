"""Random HTTP requests: each gets an answer or an error, but no internal one, and the server continues."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from jengine.serving.http.bodies import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    EMBEDDING,
    IGNORED,
    LOAD_LORA,
    NEUTRAL,
    RERANK,
    SCORE,
    TOKENIZE,
    UNLOAD_LORA,
)
from jengine.serving.http.messages.body import COUNT, FORM
from jengine.serving.http.responses.body import FORM as RESPONSES
from tests.serving import http_mutations
from tests.serving.adapters import options, write_adapter
from tests.serving.conftest import MockServer, serve_mock
from tests.serving.echo import echo_model
from tests.serving.test_fuzz import REALS, TEXTS, WHOLE
from tests.serving.test_http_tools import CALL, WEATHER

FORMS = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": FORM,
    "/v1/messages/count_tokens": COUNT,
    "/v1/responses": RESPONSES,
    "/v1/completions": COMPLETION,
    "/v1/embeddings": EMBEDDING,
    "/v1/score": SCORE,
    "/v1/rerank": RERANK,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/load_lora_adapter": LOAD_LORA,
    "/v1/unload_lora_adapter": UNLOAD_LORA,
}
NEEDED = {  # fields that make a valid request
    "/v1/chat/completions": ("messages",),
    "/v1/messages": ("messages",),
    "/v1/messages/count_tokens": ("messages",),
    "/v1/responses": ("input",),
    "/v1/completions": ("prompt",),
    "/v1/embeddings": ("input",),
    "/v1/score": ("text_1", "text_2"),
    "/v1/rerank": ("query", "documents"),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
    "/v1/load_lora_adapter": ("lora_name", "lora_path"),
    "/v1/unload_lora_adapter": ("lora_name",),
}
# the beginnings of the last event of a stream
LAST: dict[str, tuple[str, ...]] = {
    "/v1/messages": ("event: message_stop\n", "event: error\n"),
    "/v1/responses": tuple(f"event: response.{end}\n" for end in ("completed", "incomplete", "failed")),
}
# 403: a priority that the key does not allow; 504: a timeout before the scores
STATUSES = {200, 400, 403, 404, 405, 409, 413, 415, 429, 504}
NAMES = (
    "role", "content", "type", "function", "name", "parameters", "arguments", "tool_calls", "text",
    "json_schema", "schema", "regex", "json", "id", "call_id", "input", "tool_use_id", "thinking", "format",
    "effort", "name", "output", "input_schema",
)  # fmt: skip
WORDS = [
    *TEXTS,
    CALL,
    "assistant",
    "function",
    "json_schema",
    "json_object",
    "required",
    "auto",
    "none",
    "low",
    "tool_use",
    "tool_result",
    "function_call",
    "reasoning",
    "input_text",
    "\ud800",
]
IMAGE = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
LIKELY: dict[str, list[Any]] = {
    "prompt": [
        "The quick brown fox",
        [70, 71],
        ["a", "b"],
        [[70], [71, 72]],
        "",
        "a",
        [70],
        ["a"] * 50,
        [[70]] * 250,
    ],
    "messages": [
        [{"role": "user", "content": CALL}],
        [{"role": "assistant", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "y"}]}],
        [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "rain"}]},
        ],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": IMAGE[:40], "detail": "low"}]}],
    ],
    "tools": [
        [WEATHER],
        [],
        [{"name": "weather", "input_schema": {}}],
        [{**WEATHER["function"], "type": "function"}],
    ],
    "tool_choice": [
        "auto",
        "none",
        "required",
        {"type": "function", "function": {"name": "weather"}},
        {"type": "any"},
        {"type": "auto"},
    ],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    ],
    "structured_outputs": [{"regex": "a+"}, {"choice": ["a", "b"]}, {"json": {}}, {"grammar": "start: /a/"}],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "logprobs": [True, 3, 0],
    "top_logprobs": [0, 5],
    "max_tokens": [0, 1, 20],
    "n": [1, 2, 5],
    "temperature": [0, 1.0],
    "tokens": [[1, 2], [70]],
    "text_1": ["The quick brown fox", ["a", "b"]],
    "text_2": ["a", ["a", "b"], ["a"] * 50, ["a", "\ud800"]],
    "query": ["The quick brown fox", ""],
    "documents": [["a", "b"], ["a", {"text": "b"}], [*"abcdefghij"]],
    "top_n": [0, 1, 3],
    "model": ["mock", "", "gpt", "sql"],
    "lora_name": ["sql", "haiku", "mock", ""],
    "lora_path": ["sql", "haiku", "../sql", "/etc", "a/b", "a\0", "x" * 300],
    "lora_int_id": [1, 2, 0],
    "load_inplace": [True, False],
    "request_id": ["a", ""],
    "timeout": [0, 0.01, 10],
}
FUNCTION = {**WEATHER["function"], "type": "function"}
USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
OWN: dict[str, dict[str, list[Any]]] = {
    "/v1/messages": {
        "messages": [
            [{"role": "user", "content": CALL}],
            [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, USE]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]},
            ],
            [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": IMAGE}}]}],
        ],
        "system": ["Be brief.", [{"type": "text", "text": "a"}]],
        "tools": [[{"name": "weather", "input_schema": {}}], []],
        "tool_choice": [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}],
        "thinking": [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 50}, {"type": "disabled"}],
        "output_config": [{"effort": "low"}, {"format": {"type": "json_schema", "schema": {}}}],
    },
    "/v1/responses": {
        "input": [
            "The quick brown fox",
            [{"role": "user", "content": CALL}],
            [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}],
            [
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "rain"},
            ],
        ],
        "tools": [
            [FUNCTION],
            [],
            [{"type": "namespace", "name": "n", "tools": [FUNCTION]}, {"type": "custom", "name": "c"}],
            [{"type": "web_search"}],
        ],
        "tool_choice": [
            "auto",
            "none",
            "required",
            {"type": "function", "name": "weather"},
            {"type": "custom", "name": "c"},
            {"type": "allowed_tools", "tools": [{"type": "function", "name": "weather"}]},
        ],
        "include": [["message.output_text.logprobs"]],
        "top_logprobs": [2],
        "previous_response_id": ["resp_1"],
        "text": [{"format": {"type": "json_object"}}, {"format": {"type": "json_schema", "schema": {}}}],
        "reasoning": [{"effort": "low"}, {"summary": "auto"}],
        "max_output_tokens": [1, 20],
        "store": [False, True],
    },
}
OWN["/v1/embeddings"] = {
    "input": ["The quick brown fox", [70, 71], ["a", "b"], [[70], [71, 72]], ["a"] * 50],
    "encoding_format": ["float", "base64"],
    "dimensions": [4, 8, 9],
}
OWN["/v1/messages/count_tokens"] = OWN["/v1/messages"]


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {
            rng.choice([*NAMES, rng.choice(TEXTS)]): value(rng, depth + 1) for _ in range(rng.randrange(4))
        }
    return [rng.choice(WORDS), rng.choice(REALS), rng.choice(WHOLE), None, rng.random() < 0.5][kind]


def body_of(path: str, rng: random.Random) -> bytes:
    form = FORMS[path]
    names = [
        *sorted(form._known | form._sampling),
        *IGNORED,
        *NEUTRAL,
        "nothing",
        "guided_decoding",
        *rng.sample(TEXTS, 2),
    ]
    values = {**LIKELY, **OWN.get(path, {})}
    likely = [name for name in values if name in names]
    body = {name: rng.choice(values[name]) for name in rng.sample(likely, rng.randrange(min(len(likely), 4)))}
    for name in rng.sample(names, rng.choice([0, 0, 1, 2, 8])):
        body[name] = value(rng)
    if rng.random() < 0.85:
        for name in NEEDED[path]:
            body.setdefault(name, values[name][0])
        body.setdefault("max_tokens", 5) if form in (CHAT, COMPLETION, FORM) else None
    raw = json.dumps(body).encode()
    if rng.random() < 0.1:
        spoiled = bytearray(raw)
        spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        raw = bytes(spoiled)
    return raw


async def ask(client: httpx.AsyncClient, rng: random.Random, seen: Counter[tuple[str, Any]]) -> None:
    path = rng.choice(sorted(FORMS))
    method = "POST" if rng.random() < 0.97 else rng.choice(["GET", "PUT", "OPTIONS", "HEAD", "X"])
    shown = path if rng.random() < 0.97 else path + rng.choice(["/", "?a=%ff", "//", "/%00", "/../v1/models"])
    raw = body_of(path, rng)
    async with client.stream(
        method,
        shown,
        content=raw,
        headers={"content-type": "application/json" if rng.random() < 0.97 else "x"},
    ) as answer:
        leaves = rng.random() < 0.03
        text = "" if leaves else (await answer.aread()).decode()
    assert answer.status_code in STATUSES, (answer.status_code, text, method, shown, raw[:500])
    forbidden = "min_priority" in text or path.endswith("_lora_adapter")  # which are administrators'
    assert answer.status_code != 403 or leaves or forbidden, (path, text, raw[:500])
    if not leaves and method == "POST" and answer.status_code >= 400:
        assert json.loads(text)["error"]["message"], text
    if not leaves and answer.headers["content-type"].startswith("text/event-stream"):
        last = LAST.get(path, ("data: [DONE]",))
        assert text.rpartition("\n\n")[0].rpartition("\n\n")[2].startswith(last), text[-300:]
        assert "internal server error" not in text, (text, raw)
        seen["stream", answer.status_code] += 1
    seen[path, answer.status_code] += 1


def fuzz(server: MockServer, seed: int, requests: int) -> Counter[tuple[str, Any]]:
    """The results of this many requests."""
    seen: Counter[tuple[str, Any]] = Counter()
    rng = random.Random(seed)

    async def worker(client: httpx.AsyncClient, own: random.Random) -> None:
        for _ in range(requests // 10):
            await ask(client, own, seen)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.http.removesuffix("/v1"), timeout=120) as client:
            await asyncio.gather(*[worker(client, random.Random(rng.random())) for _ in range(10)])
            server.wait_until_idle()
            answer = await client.post("/v1/completions", json={"prompt": "still here"})
            assert answer.json()["usage"]["completion_tokens"] == 16

    asyncio.run(main())
    for path in FORMS:
        assert seen[path, 200] and seen[path, 400], seen
    assert seen["stream", 200], seen
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = echo_model(tmp_path_factory.mktemp("fuzz"))
    for name in ("sql", "haiku"):
        write_adapter(folder / "adapters" / name)
    return folder


@pytest.mark.parametrize(
    "seed, requests", [(0, 600), *(pytest.param(seed, 2000, marks=pytest.mark.full) for seed in range(1, 6))]
)
def test_requests_at_random(folder: Path, seed: int, requests: int, caplog: pytest.LogCaptureFixture) -> None:
    """The long ones are 10,000 together."""
    with serve_mock(folder, server=options(folder / "adapters"), embedding_size=8, max_loras=1) as server:
        fuzz(server, seed, requests)
    wrong = [
        record
        for record in caplog.records
        if record.levelno >= logging.ERROR and record.name.startswith(("jengine", "uvicorn", "asyncio"))
    ]
    assert not wrong, wrong


def test_mutated_bodies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with http_mutations.mock_server(tmp_path) as server:
        base = server.http.removesuffix("/v1")
        seen, failed = asyncio.run(http_mutations.run(base, seed=1, bodies=500))
        server.wait_until_idle()
    assert not failed, failed[0]
    assert {200, 400} <= http_mutations.by_status(seen).keys()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
