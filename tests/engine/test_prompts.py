"""Prompts and schemas in unusual forms."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from jengine import (
    InvalidArgument,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
    Tokenizer,
    chat_prompt,
)
from jengine.api.prompts import listed, make_requests
from jengine.core.pooling import PooledStates
from jengine.spi import Embedder, Limits, SequenceLimits, scoring_of
from tests.text.conftest import byte_level


def test_bytes_are_refused_by_name() -> None:
    [prompt] = listed(cast(Any, b"x"))
    with pytest.raises(InvalidArgument, match=r"^prompt=b'x': must be text"):
        make_requests(cast(Any, None), prompt, None, "0")


TOKENIZER = Tokenizer(byte_level())


@pytest.mark.parametrize(
    "prompt", [{"prompt": "xyz"}, {"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 2], "prompt": "xyz"}]
)
def test_a_prompt_may_have_a_salt(prompt: Any) -> None:
    for salt in ("s", "é" * 256, None):
        requests = make_requests(TOKENIZER, {**prompt, "cache_salt": salt}, SamplingParams(n=2), "0")
        assert [request.cache_salt for request in requests] == [salt] * 2
        plain = make_requests(TOKENIZER, prompt, SamplingParams(n=2), "0")
        assert [request.prompt_token_ids for request in plain] == [
            request.prompt_token_ids for request in requests
        ]
        assert plain[0].cache_salt is None
    for wrong in ("", "s" * 257, 5, b"s", ["s"]):
        with pytest.raises(
            InvalidArgument, match=r"^cache_salt=.*must be text of 1 to 256 characters"
        ) as refused:
            make_requests(TOKENIZER, {**prompt, "cache_salt": wrong}, None, "0")
        assert "sss" not in str(refused.value)
    with pytest.raises(InvalidArgument, match=r"^prompt=.*must be text"):
        make_requests(TOKENIZER, cast(Any, {"cache_salt": "s"}), None, "0")


def test_a_conversation_may_have_a_salt() -> None:
    messages, template = [{"role": "user", "content": "xyz"}], "{{ messages[0].content }}"
    plain = chat_prompt(TOKENIZER, messages, chat_template=template)
    assert chat_prompt(TOKENIZER, messages, chat_template=template, cache_salt="s") == {
        **plain,
        "cache_salt": "s",
    }
    with pytest.raises(InvalidArgument, match="cache_salt"):
        chat_prompt(TOKENIZER, messages, chat_template=template, cache_salt="")


def test_a_pydantic_class_is_its_schema() -> None:
    class Answer:
        """Has the interface of pydantic's classes."""

        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "object", "properties": {"city": {"type": "string"}}}

    wanted = StructuredOutputs(json=Answer.model_json_schema())
    assert StructuredOutputs(json=Answer) == wanted
    assert SamplingParams(structured_outputs={"json": Answer}).structured_outputs == wanted
    with pytest.raises(InvalidArgument, match="a schema: text, a dict or a pydantic model class"):
        StructuredOutputs(json=int)


def test_a_models_prompt_stands_before_texts_that_are_embedded() -> None:
    """Token ids are embedded as they are."""
    pooling = PoolingParams(prompt="Query: ")
    for given in ("a fox", {"prompt": "a fox"}):
        [request] = make_requests(TOKENIZER, given, None, "a", pooling=pooling)  # type: ignore[arg-type]
        assert (
            request.prompt_token_ids == TOKENIZER.encode("Query: a fox") and request.prompt == "Query: a fox"
        )
    [request] = make_requests(TOKENIZER, [5, 6], None, "a", pooling=pooling)
    assert request.prompt_token_ids == [5, 6]
    with pytest.raises(InvalidArgument, match="must not be empty"):
        make_requests(TOKENIZER, "", None, "a", pooling=pooling)
    [request] = make_requests(TOKENIZER, "", None, "a")
    assert request.prompt_token_ids == TOKENIZER.encode("")


def test_a_models_vectors_are_cut_after_they_were_normalized() -> None:
    states = PooledStates()
    states.add(0, 1, np.array([3.0, 4.0, 12.0], np.float32))
    whole = np.array([3.0, 4.0, 12.0]) / 13
    np.testing.assert_allclose(states.vector(PoolingParams(truncate_dim=2)), whole[:2], rtol=1e-6)
    np.testing.assert_allclose(states.vector(PoolingParams(dimensions=2)), [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize(
    "similarity, expected", [("cosine", 0.6), ("dot", 18.0), ("euclidean", -5.0), ("manhattan", -7.0)]
)
def test_similarities(similarity: Any, expected: float) -> None:
    limits = Limits(
        sequence=SequenceLimits(max_model_len=8, page_size=1, pages=8),
        max_num_seqs=1,
        vocab_size=9,
        eos_token_ids=(),
        embedder=Embedder(size=2, similarity=similarity),
    )
    a, b = (RequestOutput(request_id="", prompt=None, prompt_token_ids=[], outputs=[]) for _ in "ab")
    a.embedding, b.embedding = np.array([3.0, 4.0], np.float32), np.array([6.0, 0.0], np.float32)
    assert scoring_of("a", "b", None, limits, TOKENIZER).score(a, b) == pytest.approx(expected)
