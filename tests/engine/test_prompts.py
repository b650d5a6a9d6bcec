"""Prompts and schemas that are given in other forms than expected."""

from __future__ import annotations

from typing import Any, cast

import pytest

from jengine import InvalidArgument, SamplingParams, StructuredOutputs
from jengine.prompts import listed, make_requests


def test_bytes_are_refused_by_name() -> None:
    [prompt] = listed(cast(Any, b"x"))
    with pytest.raises(InvalidArgument, match=r"^prompt=b'x': must be text"):
        make_requests(cast(Any, None), prompt, None, "0")


def test_a_pydantic_class_is_its_schema() -> None:
    class Answer:
        """As pydantic's classes look."""

        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "object", "properties": {"city": {"type": "string"}}}

    wanted = StructuredOutputs(json=Answer.model_json_schema())
    assert StructuredOutputs(json=Answer) == wanted
    assert SamplingParams(structured_outputs={"json": Answer}).structured_outputs == wanted
    with pytest.raises(InvalidArgument, match="a schema: text, a dict or a pydantic model class"):
        StructuredOutputs(json=int)
