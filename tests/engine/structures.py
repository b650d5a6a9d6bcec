"""Random structures for outputs, each with an independent checker."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jsonschema

from jengine.core.structured_outputs import StructuredOutputs

WORDS = ("name", "id", "größe", "is_open", "x y", 'quo"te', "back\\slash", "名前", "items", "a.b", "", "🙂")
LITERALS = "abcxyz019 _-.,:;/*+?()[]{}|^$#&~=<>!@%'\"\\éß"


class Structure(NamedTuple):
    """A constraint, and a checker for texts."""

    asked: StructuredOutputs
    judge: Callable[[str], bool]


def structures(count: int, seed: int) -> list[Structure]:
    """`count` structures: half are JSON schemas; the others are regular expressions, choices and Lark
    grammars in turn.
    """
    rng = random.Random(seed)
    kinds = (json_schema, regular_expression, json_schema, choice, json_schema, grammar)
    return [kinds[i % len(kinds)](rng) for i in range(count)]


# --- JSON schemas --------------------------------------------------------------------------------


def json_schema(rng: random.Random) -> Structure:
    schema = _object(rng, 2) if rng.random() < 0.7 else _schema(rng, 2)
    if rng.random() < 0.7:
        schema["x-guidance"] = {"whitespace_flexible": False}
    validator = jsonschema.Draft202012Validator(schema)

    def judge(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except json.JSONDecodeError:
            return False

    return Structure(StructuredOutputs(json=schema if rng.random() < 0.5 else json.dumps(schema)), judge)


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Bounded except for white space between the parts: strings, lists and numbers have maximum lengths."""
    flat = (_string, _string, _integer, _integer, _number, _boolean, _null, _const, _enum)
    nested = (_object, _object, _array, _array, _any_of)
    return rng.choice(flat + nested if depth else flat)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 4))
    properties = {name: _schema(rng, max(depth - 1, 0)) for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + rng.randint(0, 3)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [_schema(rng, 0) for _ in range(rng.randint(1, 2))]
    return {**schema, "items": _schema(rng, depth - 1)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random, _: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": f"^{_pattern(rng, 2)}$"}
    least = rng.randint(0, 6)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 20)}


def _integer(rng: random.Random, _: int) -> dict[str, Any]:
    low = rng.randint(-(10 ** rng.randint(0, 6)), 10 ** rng.randint(0, 6))
    high = low + rng.randint(2, 10 ** rng.randint(1, 6))
    names = rng.choice(
        (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"), ("minimum", "exclusiveMaximum"))
    )
    return {"type": "integer", names[0]: low, names[1]: high}


def _number(rng: random.Random, _: int) -> dict[str, Any]:
    low = round(rng.uniform(-100, 100), rng.randint(0, 3))
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 1000)}


def _boolean(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": rng.choice(("null", ["null", "boolean"]))}


def _value(rng: random.Random) -> object:
    return rng.choice(
        (None, True, rng.randint(-99, 99), 2.5, rng.choice(WORDS), [1, "a"], {"k": [], "ä": None})
    )


def _const(rng: random.Random, _: int) -> dict[str, Any]:
    return {"const": _value(rng)}


def _enum(rng: random.Random, _: int) -> dict[str, Any]:
    return {"enum": [_value(rng) for _ in range(rng.randint(1, 4))]}


# --- regular expressions, choices, grammars ------------------------------------------------------


def regular_expression(rng: random.Random) -> Structure:
    pattern = _pattern(rng, 3)
    return Structure(StructuredOutputs(regex=pattern), lambda text: re.fullmatch(pattern, text) is not None)


def _pattern(rng: random.Random, depth: int) -> str:
    r"""A pattern with the same meaning for Python and llguidance; \s differs between them."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice((_literal(rng), _literal(rng), r"\d", "[a-f0-9]", "[A-Z]", "[^a-z ]", "[äöü€🙂]"))
    parts = [_pattern(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    if rng.random() < 0.4:
        return f"({'|'.join(parts)})"
    least = rng.randint(0, 2)
    repeated = rng.choice(("", "?", f"{{{least},{least + rng.randint(1, 3)}}}"))
    return f"(?:{''.join(parts)}){repeated}"


def _literal(rng: random.Random) -> str:
    return re.escape("".join(rng.choice(LITERALS) for _ in range(rng.randint(1, 4))))


def choice(rng: random.Random) -> Structure:
    """Options, some of which are prefixes of others."""
    characters = LITERALS + "\n\t🙂名\x7f"
    options = [
        "".join(rng.choice(characters) for _ in range(rng.randint(1, 10))) for _ in range(rng.randint(1, 5))
    ]
    options += [option + rng.choice(characters) for option in options[:2]]
    return Structure(StructuredOutputs(choice=options), lambda text: text in options)


def grammar(rng: random.Random) -> Structure:
    return _brackets(rng) if rng.random() < 0.3 else _rules(rng)


def _rules(rng: random.Random) -> Structure:
    """Rules that refer only to later ones, so that an equivalent regular expression exists."""
    count = rng.randint(2, 4)
    rules: list[str] = []
    meant: list[str] = []  # the regular expression of rule i, from the last rule to the first
    for i in reversed(range(count)):
        alternatives = [_alternative(rng, i, meant[::-1]) for _ in range(rng.randint(1, 3))]
        rules.append(f"{_rule_name(i)}: {' | '.join(lark for lark, _ in alternatives)}")
        meant.append(f"(?:{'|'.join(regex for _, regex in alternatives)})")
    pattern = meant[-1]
    return Structure(
        StructuredOutputs(grammar="\n".join(reversed(rules))),
        lambda text: re.fullmatch(pattern, text) is not None,
    )


def _alternative(rng: random.Random, rule: int, later: list[str]) -> tuple[str, str]:
    """A sequence in Lark and as a regular expression. `later`: the rules after this one, in order."""
    lark, regex = [], []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(("text", "class", "rule")) if later else rng.choice(("text", "class"))
        if kind == "text":
            text = "".join(rng.choice(LITERALS) for _ in range(rng.randint(1, 3)))
            one = json.dumps(text), re.escape(text)
        elif kind == "class":
            characters = rng.choice(("[a-z]", "[0-9]{1,3}", "[A-F]{2}"))
            one = f"/{characters}/", characters
        else:
            which = rng.randrange(len(later))
            one = _rule_name(rule + 1 + which), later[which]
        if rng.random() < 0.3:
            one = f"({one[0]})~0..2", f"(?:{one[1]}){{0,2}}"
        lark.append(one[0])
        regex.append(one[1])
    return " ".join(lark), "".join(regex)


def _rule_name(i: int) -> str:
    return "start" if i == 0 else f"rule{i}"


def _brackets(rng: random.Random) -> Structure:
    """Balanced brackets, which no regular expression can describe."""
    pairs = rng.sample(("()", "[]", "{}", "<>"), rng.randint(1, 3))
    rules = [f'"{pair[0]}" start "{pair[1]}"' for pair in pairs]

    def judge(text: str) -> bool:
        inside = re.fullmatch(r"(\W*)[0-9]+(\W*)", text)
        closing = {pair[0]: pair[1] for pair in pairs}
        return inside is not None and inside[2] == "".join(closing.get(c, "?") for c in reversed(inside[1]))

    return Structure(StructuredOutputs(grammar=f"start: {' | '.join(rules)} | /[0-9]{{1,4}}/"), judge)
