"""Constraints that consist of parts: forced calls, and answers after a thought. Schemas in them keep their
references, types and options.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from jengine.base.errors import InvalidArgument
from jengine.core.structured_outputs import StructuredOutputs
from jengine.text.constraints import after_thought, forced_calls, object_schema
from jengine.text.grammars import compile_structure
from jengine.text.tokenizer import Tokenizer
from tests.text.conftest import byte_level


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), {"eos_token": "</s>"})


ONE = {"a": {"enum": [1]}}


def accepts(what: StructuredOutputs, text: str, tokenizer: Tokenizer) -> bool:
    matcher = compile_structure(what, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def schema(kind: dict[str, Any], where: str = "$defs", **more: Any) -> dict[str, Any]:
    """One parameter, whose type is behind two references."""
    inner = {"type": "array", "items": {"$ref": f"#/{where}/One"}}
    return {
        "type": "object",
        "properties": {"p": {"$ref": f"#/{where}/Many"}},
        "required": ["p"],
        "additionalProperties": False,
        where: {"One": kind, "Many": inner},
        **more,
    }


def calls(*each: tuple[str, Any], separators: tuple[str, str] = (", ", ": ")) -> str:
    listed = [{"name": name, "parameters": parameters} for name, parameters in each]
    return json.dumps(listed, separators=separators)


@pytest.mark.parametrize("where", ["$defs", "definitions"])
def test_each_tool_has_its_own_definitions(where: str, tokenizer: Tokenizer) -> None:
    tools = {"f": schema({"type": "integer"}, where), 'g "x"': schema({"enum": ["a/b"]}, where)}
    for inside, thought in ((None, ""), (True, "hm</think>\n\n"), (False, "<think>hm</think>")):
        both = forced_calls(tools, True, inside)
        for text, right in (
            (calls(("f", {"p": [1, 2]})), True),
            (calls(('g "x"', {"p": ["a/b"]}), ("f", {"p": []})), True),
            (calls(("f", {"p": ["a/b"]})), False),
            (calls(('g "x"', {"p": [1]})), False),
            (calls(("h", {"p": [1]})), False),
            ("[]", False),
        ):
            assert accepts(both, thought + text, tokenizer) is right, text
        one = forced_calls(tools, False, inside)
        assert not accepts(one, thought + calls(("f", {"p": [1]}), ("f", {"p": [1]})), tokenizer)


def test_each_tool_has_its_own_options(tokenizer: Tokenizer) -> None:
    tight = schema({"type": "integer"}, **{"x-guidance": {"whitespace_flexible": False}})
    either = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    loose = schema(either, **{"x-guidance": {"coerce_one_of": True}})
    tools = forced_calls({"f": tight, "g": loose}, True)
    compact, spaced = (",", ":"), (" , ", " : ")
    assert accepts(tools, calls(("f", {"p": [1]}), separators=compact), tokenizer)
    assert not accepts(tools, calls(("f", {"p": [1]}), separators=spaced), tokenizer)
    assert accepts(tools, calls(("g", {"p": [1]}), separators=spaced), tokenizer)
    assert not accepts(tools, '[{"name":"g","parameters":{' + " " * 101 + '"p":[]}}]', tokenizer)
    assert not accepts(tools, "[" + "\n" * 101 + calls(("g", {"p": []}))[1:], tokenizer)


def test_an_answer_after_a_thought_has_the_same_limits(tokenizer: Tokenizer) -> None:
    what = StructuredOutputs(json=schema({"type": "integer"}))
    for blanks, right in ((100, True), (101, False)):
        text = "{" + "\n" * blanks + '"p": [1]}'
        assert accepts(what, text, tokenizer) is right
        assert accepts(after_thought(what, True), "hm</think>" + text, tokenizer) is right
    with pytest.raises(InvalidArgument, match="must be valid JSON"):
        after_thought(StructuredOutputs(json="{\nx: /a/"), True)


@pytest.mark.parametrize("special", [True, False])
def test_a_thought_ends_with_the_models_token(special: bool) -> None:
    """A text does not match the token of the same text. Models may also spell it."""
    backend = byte_level()
    spelled = [backend.token_to_id(character) for character in "hm</think>"]
    backend.add_tokens([AddedToken(tag, special=special) for tag in ("<think>", "</think>")])
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"})
    what = StructuredOutputs(json={"enum": [1]})
    tools = {"f": {"type": "object", "properties": ONE}}
    for inside, before in ((True, ""), (False, "<think>")):
        for constraint, text in (
            (after_thought(what, inside), "1"),
            (forced_calls(tools, True, inside), calls(("f", {"a": 1}))),
        ):
            assert accepts(constraint, f"{before}hm</think>\n\n{text}", tokenizer)
            assert not accepts(constraint, f"{before}hm</think>\n\nx", tokenizer)
            assert not accepts(constraint, f"{before}hm</think>" + "\n" * 5 + text, tokenizer)
            assert inside or accepts(constraint, text, tokenizer)
    matcher = compile_structure(after_thought(what, True), tokenizer)
    assert matcher.try_consume_tokens(spelled) == len(spelled) and not matcher.is_accepting()
    assert matcher.try_consume_tokens(tokenizer.encode("1", add_special_tokens=False)) == 1


def test_no_call_begins_with_whitespace(tokenizer: Tokenizer) -> None:
    tools = {"f": {"type": "object", "properties": ONE}}
    for what, text in (
        (forced_calls(tools, True), calls(("f", {"a": 1}))),
        (StructuredOutputs(json=object_schema("parameters", tools["f"])), '{"a": 1}'),
    ):
        assert accepts(what, text, tokenizer)
        assert not accepts(what, " " + text, tokenizer) and not accepts(what, "\n" + text, tokenizer)


@pytest.mark.parametrize(
    "given",
    [
        {"properties": ONE, "required": ["a"]},
        {"$ref": "#/definitions/A", "definitions": {"A": {"required": ["a"], "properties": ONE}}},
        {"anyOf": [{"type": "string"}, {"properties": ONE, "required": ["a"]}]},
        {"type": ["object", "null"], "properties": ONE, "required": ["a"]},
    ],
)  # fmt: skip
def test_arguments_are_an_object(given: dict[str, Any], tokenizer: Tokenizer) -> None:
    what = StructuredOutputs(json=object_schema("parameters", given))
    assert accepts(what, '{"a": 1}', tokenizer)
    assert not any(accepts(what, text, tokenizer) for text in ("null", '"Hi"', "[1]", "1"))


@pytest.mark.parametrize("kind", ["string", ["string", "null"], "nothing", 5])
def test_parameters_that_allow_no_object(kind: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=r"^tools\[1\]=.*the type of a tool's parameters must be object"
    ):
        object_schema("tools[1]", {"type": kind})


@pytest.mark.parametrize(
    "what, field, message",
    [
        (
            forced_calls({"f": {"type": "object"}, "g": {"$ref": "#/$defs/None"}}, True),
            "tools[1]",
            """tools[1]='{"$ref": "#/$defs/None", "x-guidance""",
        ),
        (after_thought(StructuredOutputs(json={"not": {}}), True), "structured_outputs", """='{"not": {}"""),
        (StructuredOutputs(json={"uniqueItems": True}), "structured_outputs", """='{"uniqueItems": true}'"""),
        (StructuredOutputs(json={"oneOf": [{}, {}]}), "structured_outputs", '"x-guidance": {"coerce_one_of"'),
        (StructuredOutputs(regex="a(?=b)"), "structured_outputs", "='a(?=b)': llguidance cannot read it:"),
        (StructuredOutputs(grammar='start: "a" x'), "structured_outputs", """='start: "a" x': llguidance"""),
    ],
)
def test_errors_have_what_the_client_gave(
    what: StructuredOutputs, field: str, message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidArgument) as wrong:
        compile_structure(what, tokenizer)
    said = str(wrong.value)
    assert wrong.value.field == field and message in said
    assert "StructuredOut" not in said and "Some(" not in said and "start: thought" not in said
