"""Limits of grammars, and their compilation: on a large stack, once for all samples of a prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tokenizers import decoders

from jengine.api.prompts import make_requests
from jengine.base.errors import InvalidArgument, JengineError
from jengine.core.request import SamplingParams
from jengine.core.structured_outputs import StructuredOutputs
from jengine.text import grammars, masks
from jengine.text.constraints import WHITESPACE, schema_text
from jengine.text.grammars import (
    MAX_CHARACTERS,
    MAX_REFS,
    MAX_RULES,
    check_structure,
    compile_structure,
    probe_structure,
)
from jengine.text.tokenizer import Tokenizer
from tests.text.conftest import byte_level


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), {"eos_token": "</s>"})


def schema(refs: int) -> StructuredOutputs:
    """A chain."""
    defs: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["x"]}
        for i in range(refs)
    }
    return StructuredOutputs(
        json=json.dumps({"$ref": "#/$defs/d0", "$defs": {**defs, f"d{refs}": {"type": "integer"}}})
    )


def short_schema(refs: int) -> StructuredOutputs:
    """A schema with the fewest possible characters per level."""
    defs: dict[str, Any] = {f"{i:x}": {"items": {"$ref": f"#/d/{i + 1:x}"}} for i in range(refs)}
    return StructuredOutputs(
        json=json.dumps({"$ref": "#/d/0", "d": {**defs, f"{refs:x}": {}}}, separators=(",", ":"))
    )


def lark(rules: int) -> StructuredOutputs:
    chain = "\n".join(f'r{i}: "a" r{i + 1} | r{i + 1}' for i in range(rules - 2))
    return StructuredOutputs(grammar=f'start: r0\n{chain}\nr{rules - 2}: "b"')


@pytest.mark.parametrize(
    "what",
    [schema(MAX_REFS - 10), short_schema(MAX_REFS - 10), lark(MAX_RULES)],
    ids=["json", "short", "lark"],
)
def test_the_deepest_that_pass_the_limits_do_not_overflow_the_stack(
    what: StructuredOutputs, tokenizer: Tokenizer
) -> None:
    """These ended the process, which is what this test does when it fails."""
    assert not compile_structure(what, tokenizer, grammars.STACK // 4).is_error()


def test_what_the_limits_do_not_see_does_not_overflow_the_stack(tokenizer: Tokenizer) -> None:
    """The limits read text, not JSON, so an escape hides a name from them. Then only the size bounds the
    depth.
    """
    deepest = next(
        what for refs in range(4_000, 0, -100) if len(str((what := hidden(refs)).json)) <= MAX_CHARACTERS
    )
    assert not compile_structure(deepest, tokenizer).is_error()


def hidden(refs: int) -> StructuredOutputs:
    return StructuredOutputs(json=str(short_schema(refs).json).replace("$ref", "\\u0024ref"))


@pytest.mark.parametrize(
    "what, limit",
    [
        (schema(MAX_REFS + 1), f"at most {MAX_REFS}"),
        (lark(MAX_RULES + 1), f"at most {MAX_RULES}"),
        (StructuredOutputs(regex="x" * (MAX_CHARACTERS + 1)), f"at most {MAX_CHARACTERS}"),
        (
            StructuredOutputs(choice=["x" * (MAX_CHARACTERS // 2), "y" * (MAX_CHARACTERS // 2 + 1)]),
            f"at most {MAX_CHARACTERS}",
        ),
        (StructuredOutputs(json={"const": "x" * MAX_CHARACTERS}), f"at most {MAX_CHARACTERS}"),
    ],
    ids=["refs", "rules", "regex", "choice", "json"],
)
def test_limits(what: StructuredOutputs, limit: str, tokenizer: Tokenizer) -> None:
    for refuse in (check_structure, lambda what: compile_structure(what, tokenizer)):
        with pytest.raises(InvalidArgument, match=limit) as wrong:
            refuse(what)  # type: ignore[operator]
        assert wrong.value.field == "structured_outputs"


def test_a_tokenizer_that_llguidance_cannot_read() -> None:
    backend = byte_level()
    backend.decoder = decoders.Fuse()
    with pytest.raises(
        InvalidArgument,
        match=r"^structured_outputs=.*: llguidance cannot read this model's tokenizer: .*decoder",
    ):
        compile_structure(StructuredOutputs(choice=["a"]), Tokenizer(backend, {"eos_token": "</s>"}))


def test_rules_are_counted() -> None:
    """Definitions and terminals of any form; no colons in strings."""
    grammar = 'start: a | B\n?a: "x:" \n!b.2 : /y:/\nB: "c: d"\n  // note: none\n_c{x}: x\n%ignore " "'
    names = [head.rstrip(":").strip() for head in grammars._RULE.findall(grammar)]
    assert names == ["start", "?a", "!b.2", "B", "_c{x}"]


LINEAR = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))  # seconds; a scan in quadratic time would need days
from jengine.core.structured_outputs import StructuredOutputs
from jengine.text import grammars
grammars.MAX_CHARACTERS = 10**8
for long in ("a" * 10**7, "\\n" * 10**7, "a\\n" * 10**6, " " * 10**7, "a: " * 10**6, "?" * 10**7):
    grammars.check_structure(StructuredOutputs(grammar='start: "a"\\n' + long))
for long in ('"$ref"' * 10**6, '"$ref" ' + " " * 10**7, '"$ref":' * 10**6, '"$ref":"' + "a" * 10**7):
    grammars.check_structure(StructuredOutputs(json=long))
print("done")
"""


def test_the_limits_are_checked_in_linear_time() -> None:
    """One line of 100 kB used to take 16 s, in the server's event loop."""
    done = subprocess.run([sys.executable, "-c", LINEAR], capture_output=True, text=True)
    assert done.stdout == "done\n", done


def test_samples_share_what_is_compiled(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[StructuredOutputs] = []

    def counting(what: StructuredOutputs, tokenizer: Tokenizer) -> Any:
        compiled.append(what)
        return compile_structure(what, tokenizer)

    monkeypatch.setattr(masks, "compile_structure", counting)
    params = SamplingParams(n=8, structured_outputs=StructuredOutputs(choice=["ab", "cd"]), bad_words=["x"])
    requests = make_requests(tokenizer, "The", params, "r")
    assert len(compiled) == 1

    def allowed(index: int) -> set[int]:
        words = np.full(-(-tokenizer.vocab_size // 32), 0xFFFFFFFF, np.uint32)
        mask = requests[index].mask
        assert mask is not None
        mask.fill(words)
        return {token for token in range(tokenizer.vocab_size) if words[token // 32] >> (token % 32) & 1}

    a, b, c, d = (tokenizer.encode(letter, False)[0] for letter in "abcd")
    assert {a, c} <= allowed(0) == allowed(7)
    for request, token in zip(requests, (a, c), strict=False):
        assert request.mask is not None
        request.mask.accept(token)
    assert allowed(0) == {b} and allowed(1) == {d} and {a, c} <= allowed(2)
    assert all(request.mask is None for request in make_requests(tokenizer, "The", params, "r", masks=False))
    assert len(compiled) == 1


def test_a_copy_does_not_wait_for_a_call_that_was_given_up(tokenizer: Tokenizer) -> None:
    first = masks.Grammar(StructuredOutputs(regex="a*"), tokenizer)
    second = first.copy()
    # as in a thread that is still at work
    with first._busy, pytest.raises(JengineError, match="another sample"):
        second.fill(np.zeros(-(-tokenizer.vocab_size // 32), np.uint32))


def test_a_choice_may_have_thousands_of_texts(tokenizer: Tokenizer) -> None:
    """As alternatives of one rule, they exceeded the parser's limit at the first token."""
    matcher = compile_structure(StructuredOutputs(choice=[f"x{i:04d}" for i in range(5_000)]), tokenizer)
    assert matcher.consume_tokens(tokenizer.encode("x1234", False)) and matcher.is_accepting()


def test_a_first_mask_that_takes_too_long_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_structure(StructuredOutputs(regex="a*"), tokenizer)
    monkeypatch.setattr(grammars, "MASK_SECONDS", 0.0)
    with pytest.raises(InvalidArgument, match="a mask takes"):
        probe_structure(StructuredOutputs(regex="a*"), tokenizer)


@pytest.mark.parametrize(("blanks", "taken"), [(0, True), (100, True), (101, False)])
def test_whitespace_in_json_is_bounded(blanks: int, taken: bool, tokenizer: Tokenizer) -> None:
    """An uncertain model could otherwise generate whitespace up to max_tokens. A schema may allow more."""
    ids = tokenizer.encode(
        "{" + " " * (blanks // 2) + "\n" * (blanks - blanks // 2) + '"a": 1}', add_special_tokens=False
    )
    what: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    matcher = compile_structure(StructuredOutputs(json=what), tokenizer)
    assert (matcher.try_consume_tokens(ids) == len(ids)) is taken
    more = compile_structure(StructuredOutputs(json=what, whitespace_pattern="[ \n]+"), tokenizer)
    assert more.try_consume_tokens(ids) == len(ids)
    none = compile_structure(StructuredOutputs(json=json.dumps(what), disable_any_whitespace=True), tokenizer)
    compact = tokenizer.encode('{"a":1}', add_special_tokens=False)
    assert (
        none.try_consume_tokens(ids) < len(ids)
        and none.reset()
        and none.try_consume_tokens(compact) == len(compact)
    )


def test_options_of_whitespace_become_part_of_the_schema() -> None:
    what = StructuredOutputs(json={"x-guidance": {"item_separator": ","}}, disable_any_whitespace=True)
    assert what == StructuredOutputs(
        json={"x-guidance": {"item_separator": ",", "whitespace_flexible": False}}
    )
    assert SamplingParams(structured_outputs={"json": "{}", "whitespace_pattern": " "}) == SamplingParams(
        structured_outputs={"json": {"x-guidance": {"whitespace_pattern": " "}}}
    )
    plain = StructuredOutputs(json="{}", disable_any_whitespace=False)
    assert plain.json == "{}"


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace=True: only with json"),
        ({"json": "{}", "disable_any_whitespace": 1}, "disable_any_whitespace=1: must be true or false"),
        ({"json": "{}", "whitespace_pattern": 1}, "whitespace_pattern=1: must be a regular expression"),
        (
            {"json": "{}", "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern=' ': not with disable_any_whitespace",
        ),
        ({"json": "{", "disable_any_whitespace": True}, "json='{': must be valid JSON"),
        ({"json": "[]", "disable_any_whitespace": True}, "must be an object, with disable_any_whitespace"),
        ({"json": {"x-guidance": 1}, "whitespace_pattern": " "}, "must be an object, with whitespace_"),
    ],
)
def test_wrong_options_of_whitespace(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=r"structured_outputs\.") as failed:
        StructuredOutputs(**fields)
    assert says in str(failed.value)


@pytest.mark.parametrize("schema", ["[]", "{", '{"x-guidance": 1}', "5"])
def test_what_is_no_schema_stays_as_it_is(schema: str) -> None:
    assert schema_text(schema) == schema


@pytest.mark.parametrize("options", [{"whitespace_flexible": False}, {"whitespace_pattern": " "}])
def test_whitespace_has_a_limit_unless_a_schema_says_otherwise(options: dict[str, Any]) -> None:
    chosen = {"x-guidance": options, "type": "object"}
    assert json.loads(schema_text(chosen)) == chosen
    other = {"x-guidance": {"item_separator": ","}, "properties": {"x-guidance": {"x-guidance": options}}}
    for schema in (other, {}, True):
        assert json.loads(schema_text(schema))["x-guidance"]["whitespace_pattern"] == WHITESPACE
