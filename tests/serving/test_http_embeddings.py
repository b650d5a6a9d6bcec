"""/v1/embeddings with OpenAI's client: every form of input, and rejected requests."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from jengine import SamplingParams
from tests.serving.conftest import MockServer, serve_mock

SIZE = 8
TEXT = "The quick brown fox"


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[MockServer]:
    options = {"port": 0, "max_waiting": 4, "max_streams_per_client": 4}
    with serve_mock(
        tokenizer_folder,
        server=options,
        embedding_size=SIZE,
        max_num_seqs=1,
        seconds=0.001,
        max_model_len=10_000,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: MockServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.http, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def counts(ids: list[int], dimensions: int = SIZE, normalize: bool = True) -> np.ndarray:
    """The mock engine's embedding."""
    vector = np.bincount(np.array(ids) % SIZE, minlength=SIZE)[:dimensions].astype(np.float32)
    return vector / max(float(np.linalg.norm(vector)), 1.0) if normalize else vector


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_prompts_of_every_form(encoding: Any, server: MockServer, client: OpenAI) -> None:
    ids = server.llm.tokenizer.encode(TEXT)
    # the client itself asks for base64, and decodes it
    options: Any = {} if encoding is None else {"encoding_format": encoding}
    forms: list[tuple[Any, list[list[int]]]] = [
        (TEXT, [ids]),
        ([TEXT, "a"], [ids, server.llm.tokenizer.encode("a")]),
        ([5, 6], [[5, 6]]),
        ([[5], ids], [[5], ids]),
    ]
    for given, expected in forms:
        answer = client.embeddings.create(model="mock", input=given, **options)
        assert (answer.object, answer.model) == ("list", "mock") and [one.index for one in answer.data] == [
            *range(len(expected))
        ]
        for one, prompt in zip(answer.data, expected, strict=True):
            vector: Any = (
                np.frombuffer(base64.b64decode(one.embedding), "<f4")
                if encoding == "base64"
                else one.embedding
            )  # type: ignore[arg-type]
            np.testing.assert_allclose(vector, counts(prompt), rtol=1e-6)
        tokens = sum(map(len, expected))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    server.wait_until_idle()


def test_parameters(server: MockServer, client: OpenAI) -> None:
    ids = server.llm.tokenizer.encode(TEXT, add_special_tokens=False)
    extra = {
        "normalize": False,
        "pooling": "mean",
        "add_special_tokens": False,
        "request_id": "mine",
        "user": "me",
    }
    answer = client.embeddings.create(
        model="mock", input=TEXT, dimensions=5, encoding_format="float", extra_body=extra
    )
    assert answer.data[0].embedding == counts(ids, 5, normalize=False).tolist()
    assert answer._request_id == "mine"


def test_more_inputs_than_a_client_may_have_at_once(server: MockServer, client: OpenAI) -> None:
    inputs, tokenizer = [f"text {i}" for i in range(11)], server.llm.tokenizer
    answer = client.embeddings.create(model="mock", input=inputs, encoding_format="float")
    assert [one.index for one in answer.data] == [*range(11)]
    for one, text in zip(answer.data, inputs, strict=True):
        np.testing.assert_allclose(one.embedding, counts(tokenizer.encode(text)), rtol=1e-6)
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in inputs)
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]|input"):
        client.embeddings.create(model="mock", input=[*["a"] * 9, "b " * 9000])
    server.wait_until_idle()


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [5, "a"]}, "input"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "5"}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "a", "temperature": 1.0}, "temperature"),
        ({"input": [501]}, "input"),
        ({"input": [5] * 10_001}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": ""}, "input"),
    ],
)
def test_what_is_refused(body: dict[str, Any], param: str, server: MockServer) -> None:
    answer = httpx.post(f"{server.http}/embeddings", json={"model": "mock", **body}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    server.wait_until_idle()


def test_a_timeout(server: MockServer, client: OpenAI) -> None:
    handle = server.run(_submit(server))
    with pytest.raises(openai.APIStatusError) as wrong:
        client.embeddings.create(model="mock", input=TEXT, extra_body={"timeout": 0.0})
    assert wrong.value.status_code == 504 and "timeout" in str(wrong.value)
    server.run(_close(handle))
    server.wait_until_idle()


async def _submit(server: MockServer) -> Any:
    """A request that takes the only place."""
    return server.llm.submit([1], SamplingParams(max_tokens=None, ignore_eos=True))


async def _close(handle: Any) -> None:
    handle.close()


def test_a_model_without_embeddings(tokenizer_folder: Path) -> None:
    with serve_mock(tokenizer_folder, server={"port": 0}) as server:
        answer = httpx.post(f"{server.http}/embeddings", json={"model": "mock", "input": "a"}, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "embeddings", answer.text
