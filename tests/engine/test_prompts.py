"""Prompts and schemas in unusual forms."""

from __future__ import annotations

from typing import Any, cast

import pytest

from jengine import InvalidArgument, SamplingParams, StructuredOutputs, Tokenizer, chat_prompt
from jengine.api.prompts import listed, make_requests
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
