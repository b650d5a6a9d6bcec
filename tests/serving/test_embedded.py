"""OpenAI's API inside a program: the same as from the server, without a port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jengine import AsyncLLM, InvalidArgument, Tokenizer
from jengine.api.backend import EngineThread
from jengine.serving.config import ServerConfig
from jengine.serving.http.embedded import EMBEDDED, EmbeddedApi, embedded_config
from tests.mocks.mock_engine import MockEngine


def within(folder: Path, work: Callable[[AsyncLLM, EmbeddedApi], Awaitable[None]], **options: Any) -> None:
    """Runs a function with a mock engine."""

    async def main() -> None:
        async with AsyncLLM.over(
            EngineThread(MockEngine(vocab_size=501, **options)), Tokenizer.load(folder)
        ) as llm:
            api = EmbeddedApi(llm, "mock", ServerConfig(max_message_bytes=2000))
            try:
                await work(llm, api)
            finally:
                api.close()

    asyncio.run(main())


def test_whole_answers(tokenizer_folder: Path) -> None:
    async def work(llm: AsyncLLM, api: EmbeddedApi) -> None:
        reply = await api.post("/v1/completions", json.dumps({"prompt": "hello", "max_tokens": 3}).encode())
        answer, ids = json.loads(reply.body), llm.tokenizer.encode("hello")
        assert (
            reply.status == 200
            and answer["model"] == "mock"
            and answer["choices"][0]["text"] == llm.tokenizer.decode(ids[:3])
        )
        assert answer["id"] == f"cmpl-{reply.headers['x-request-id']}"
        stream = await api.post(
            "/v1/completions", json.dumps({"prompt": "hello", "max_tokens": 3, "stream": True}).encode()
        )
        assert stream.headers["content-type"].startswith("text/event-stream") and stream.body.endswith(
            b"data: [DONE]\n\n"
        )
        for path, body, status in (
            ("/v1/completions", b"{", 400),
            ("/v1/none", b"{}", 404),
            ("/v1/completions", b" " * 2001, 413),
        ):
            wrong = await api.post(path, body)
            assert wrong.status == status and json.loads(wrong.body)["error"]["message"]

    within(tokenizer_folder, work)


def test_options_without_effect_are_refused() -> None:
    assert embedded_config({"max_waiting": 3}, response_store_bytes=0).response_store_bytes == 0
    assert embedded_config({"response_store_bytes": 9}, response_store_bytes=0).response_store_bytes == 9
    accepted = set()
    for option in fields(ServerConfig):
        try:
            embedded_config({option.name: option.default})
        except InvalidArgument as wrong:
            assert wrong.field == f"server.{option.name}" and "has no effect" in wrong.limit
        else:
            accepted.add(option.name)
    assert accepted == EMBEDDED
    assert not EMBEDDED & {"api_key", "rollout_api", "allowed_origins", "max_connections", "lora_dir"}
    with pytest.raises(InvalidArgument, match=r"server.api_key='\.\.\.': has no effect"):
        embedded_config({"api_key": "secret"})


def test_all_names_are_served(tokenizer_folder: Path) -> None:
    async def work(llm: AsyncLLM, api: EmbeddedApi) -> None:
        named = EmbeddedApi(llm, "mock", ServerConfig(served_model_name=("a", "b")))
        try:
            for name, status in (("a", 200), ("b", 200), ("mock", 404)):
                body = {"model": name, "prompt": "hello", "max_tokens": 1}
                reply = await named.post("/v1/completions", json.dumps(body).encode())
                assert reply.status == status, reply.body
                if status == 200:
                    assert json.loads(reply.body)["model"] == "a"
            _, *parts = [part async for part in named.answer("GET", "/v1/models", {}, b"")]
            assert [model["id"] for model in json.loads(b"".join(parts))["data"]] == ["a", "b"]
        finally:
            named.close()

    within(tokenizer_folder, work)


def test_tokens_of_unfinished_requests(tokenizer_folder: Path) -> None:
    """Also counts those of a request that fails."""

    async def work(llm: AsyncLLM, api: EmbeddedApi) -> None:
        assert api.unfinished_tokens == 0
        first = asyncio.ensure_future(api.post("/v1/completions", b'{"prompt": [1, 2, 3], "max_tokens": 30}'))
        while not api.unfinished_tokens:
            await asyncio.sleep(0)
        assert api.unfinished_tokens == 3
        while api.unfinished_tokens == 3:
            await asyncio.sleep(0.001)
        assert 3 < api.unfinished_tokens <= 33
        assert (await first).status == 200 and api.unfinished_tokens == 0
        # the 40th step fails
        assert (await api.post("/v1/completions", b'{"prompt": [1, 2, 3], "max_tokens": 30}')).status == 503
        assert api.unfinished_tokens == 0

    within(tokenizer_folder, work, seconds=0.002, fail_at=40)
