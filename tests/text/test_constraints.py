"""Constraints that consist of parts: forced calls, and answers after a thought. Schemas in them keep their
references, types and options.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import AddedToken

from jengine.base.errors import InvalidArgument
from jengine.core.structured_outputs import StructuredOutputs
from jengine.text.constraints import after_thought, forced_calls, object_schema, schema_text
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


A: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"enum": [2]}}, "required": ["b"]}
BOTH = '{"a": 1, "b": 2}'


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A, '{"a": 1}', '{"a": 1, "x": 0}'),
        ({"type": "object", "properties": {}}, "{}", '{"x": 0}'),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, '{"a": 1}', '{"a": 1, "x": 0}'),
        ({"type": "array", "items": A}, '[{"a": 1}]', '[{"a": 1, "x": 0}]'),
        ({"type": "array", "prefixItems": [A]}, '[{"a": 1}]', '[{"a": 1, "x": 0}]'),
        ({"properties": {"enum": A}, "type": "object"}, '{"enum": {"a": 1}}', '{"enum": {"a": 1, "x": 0}}'),
        ({"additionalProperties": A, "type": "object"}, '{"x": {"a": 1}}', '{"x": {"a": 1, "x": 0}}'),
        ({"anyOf": [A, {"type": "null"}]}, '{"a": 1}', '{"a": 1, "x": 0}'),
        ({"oneOf": [A, B]}, '{"b": 2}', BOTH),
        ({"allOf": [A], "description": "d"}, '{"a": 1}', '{"a": 1, "x": 0}'),
        ({"allOf": [A, B]}, BOTH, '{"a": 1, "b": 2, "x": 0}'),
        ({"allOf": [A, {"allOf": [B]}]}, BOTH, '{"a": 1, "b": 2, "x": 0}'),
        ({**A, "$ref": "#/$defs/B", "$defs": {"B": B}}, BOTH, '{"a": 1, "b": 2, "x": 0}'),
        ({**A, "anyOf": [B, {"type": "object"}]}, BOTH, '{"a": 1, "b": 2, "x": 0}'),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": [x]} for x in "ab"]},
            '{"b": 2}',
            '{"b": 2, "x": 0}',
        ),
    ],
)  # fmt: skip
def test_objects_have_no_other_properties(
    schema: dict[str, Any], right: str, wrong: str, tokenizer: Tokenizer
) -> None:
    """As a constraint, after a thought, and as a tool's parameters, unless the request or the schema opens
    them.
    """
    what = StructuredOutputs(json=schema)
    assert what.json is schema and "additionalProperties" not in A, "the caller's schema is unchanged"
    for text, accepted in ((right, True), (wrong, False)):
        assert accepts(what, text, tokenizer) is accepted
        assert accepts(StructuredOutputs(json=json.dumps(schema)), text, tokenizer) is accepted
        assert accepts(after_thought(what, True), f"hm</think>{text}", tokenizer) is accepted
        call = f'[{{"name": "f", "parameters": {{"p": {text}}}}}]'
        definitions = {name: value for name, value in schema.items() if name == "$defs"}
        tool = {"type": "object", "properties": {"p": schema}, **definitions}
        assert accepts(forced_calls({"f": tool}, False), call, tokenizer) is accepted
    if "oneOf" not in schema:  # of open objects, both may match
        opened = StructuredOutputs(json=schema, disable_additional_properties=False)
        assert accepts(opened, right, tokenizer) and accepts(opened, wrong, tokenizer)


@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ({**A, "additionalProperties": True}, '{"a": 1, "x": 0}'),
        ({**A, "patternProperties": {"^x": {}}}, '{"a": 1, "x": 0}'),
        ({"type": "object"}, '{"x": 0}'),
        ({"const": {"properties": {}}}, '{"properties": {}}'),
        ({**A, "required": ["a", "x"]}, '{"a": 1, "x": 0}'),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, '{"a": 1, "b": 2, "x": 0}'),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, BOTH),
    ],
)
def test_objects_that_stay_open(schema: dict[str, Any], right: str, tokenizer: Tokenizer) -> None:
    assert accepts(StructuredOutputs(json=schema), right, tokenizer)


def test_closing_objects_takes_little_time() -> None:
    """Schemas that would grow with the square of their length, or overflow the stack, stay open."""
    names = {f"n{number}": True for number in range(3_000)}
    each = {f"p{number}": {"allOf": [{"$ref": "#/$defs/N"}, A]} for number in range(600)}
    many = json.dumps({"properties": each, "$defs": {"N": {"properties": names}}})
    part = json.dumps(A)
    for text in (many, *(f'{{"allOf": [{part}, ' * depth + part + "]}" * depth for depth in (400, 5_000))):
        assert len(schema_text(text)) < len(text) + 200
    itself = {"allOf": [{"$ref": "#"}, A], "properties": {"b": {"$ref": "#/nowhere", **A}}}
    assert "additionalProperties" not in schema_text(itself)


@pytest.mark.parametrize(
    "draft",
    [
        "https://json-schema.org/draft-07/schema#",
        "http://json-schema.org/schema#",
        "http://json-schema.org/draft/2019-09/schema#",
        7,
    ],
)
def test_a_schema_of_an_unknown_draft_is_read(draft: object, tokenizer: Tokenizer) -> None:
    schema = {"$schema": draft, "type": "object", "properties": {"$schema": {"$schema": draft, **A}}}
    text = json.dumps(schema)
    assert accepts(StructuredOutputs(json=schema), '{"$schema": {"a": 1}}', tokenizer)
    assert json.dumps(schema) == text
    for known in ("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"):
        assert json.loads(schema_text({"$schema": known}))["$schema"] == known


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"json": A, "disable_additional_properties": 0}, "disable_additional_properties=0: must be true or"),
        ({"regex": "a", "disable_additional_properties": False}, "=False: only with json"),
        ({"json": "{", "disable_additional_properties": False}, "json='{': must be valid JSON"),
        ({"json": {"a": {1}}, "disable_additional_properties": False}, "must be valid JSON: "),
    ],
)
def test_wrong_ways_to_open_objects(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(says)):
        StructuredOutputs(**fields)


SQL = """# as in vLLM's examples
root ::= select-statement
select-statement ::= "SELECT " column " from " table
    | "SHOW " [a-z]{1,3}
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
"""


@pytest.mark.parametrize("before", ["", "hm</think>"])
def test_grammars_may_be_gbnf(before: str, tokenizer: Tokenizer) -> None:
    what = StructuredOutputs(grammar=SQL.replace("\n    |", " |"))
    what = after_thought(what, True) if before else what
    for text, right in (("SELECT col_1 from table_2", True), ("SHOW ab", True), ("SHOW abcd", False)):
        assert accepts(what, before + text, tokenizer) is right


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("root ::= word", "cannot be read as GBNF: Rule 'word' not found"),
        ('start ::= "a"', "cannot be read as GBNF: No 'root' rule found"),
        ('root ::= "a', "cannot be read as GBNF: Unexpected end of input at line 1"),
        ('root ::= "\\', "cannot be read as GBNF: it ends within an escape"),
        ("root ::= [z-a]", "llguidance cannot read it: at 1(8): invalid regex"),
        ("root ::= a\n\n\na ::= b\nb ::= [z-a]", "llguidance cannot read it: at "),
        ("root ::= " + "(" * 9_000, "cannot be read as GBNF: maximum recursion depth"),
        ("root ::= " + "x" * 9_000, "cannot be read as GBNF: Rule 'xxx"),
    ],
)
def test_what_is_wrong_in_gbnf_is_said(grammar: str, says: str, tokenizer: Tokenizer) -> None:
    for what in (StructuredOutputs(grammar=grammar), after_thought(StructuredOutputs(grammar=grammar), True)):
        with pytest.raises(InvalidArgument, match=re.escape(says)) as wrong:
            compile_structure(what, tokenizer)
        assert wrong.value.field == "structured_outputs" and wrong.value.value == grammar
        assert len(str(wrong.value)) < 500
