"""The options that type checkers know are those that LLM takes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_type_hints

import pytest

from jengine.base.errors import InvalidArgument
from jengine.base.options import Check, check_options, groups_of, read_as, texts_of, whole
from jengine.core.config import EngineConfig
from jengine.core.engine_options import EngineOptions


def test_they_have_the_names_and_types_of_the_fields() -> None:
    hints = {name: hint for name, hint in get_type_hints(EngineConfig).items() if name != "model"}
    assert get_type_hints(EngineOptions) == hints
    assert not EngineOptions.__required_keys__


halved: Check = read_as(lambda value: value // 2)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes.

    Args:
        width: a number, which is stored
            halved.
        height: another; None: none.
    """

    width: Annotated[int, whole(2), halved] = 2
    height: Annotated[int | None, whole(1)] = None


@dataclass(frozen=True, kw_only=True)
class Shape(Sizes):
    """A shape.

    Args:
        kind: its kind.
    """

    kind: Literal["square", "round"] | None = "round"
    filled: bool | None = None

    def __post_init__(self) -> None:
        check_options(self)


def test_fields_are_checked_by_types_and_annotations() -> None:
    assert Shape(width=7, height=1, kind=None, filled=True).width == 3
    wrong = {"width": 1, "height": 0, "kind": "flat", "filled": 1}
    limits = [
        "width=1: must be a whole number, at least 2",
        "height=0: must be a whole number, at least 1",
        "kind='flat': must be one of square, round, None",
        "filled=1: must be True, False or None",
    ]
    for (name, value), limit in zip(wrong.items(), limits, strict=True):
        with pytest.raises(InvalidArgument) as refused:
            Shape(**{name: value})  # type: ignore[arg-type]
        assert str(refused.value) == limit


def test_a_field_without_a_check_is_an_error() -> None:
    @dataclass(frozen=True)
    class Loose:
        number: int = 0

    with pytest.raises(TypeError, match="declare a check"):
        check_options(Loose())


def test_groups_and_texts() -> None:
    assert groups_of(Shape) == [Sizes, Shape]
    assert texts_of(Shape) == {
        "width": "a number, which is stored halved.",
        "height": "another; None: none.",
        "kind": "its kind.",
    }
    groups = groups_of(EngineConfig)
    names = [name for group in groups for name in group.__annotations__]
    assert list(dict.fromkeys(names)) == [field.name for field in fields(EngineConfig)]
