"""Matches regular expressions of untrusted files against names, in bounded time.

Python's `re` backtracks, and holds the interpreter meanwhile: a short pattern can stop a process for hours.
Here, a set of positions in all names is an integer with a bit for each position. So each part of a pattern
takes a few operations on integers, for all names at once. The syntax is Python's, and Python's own parser
reads it. Parts that only make sense with backtracking, such as references to groups, are rejected.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

MAX_LENGTH = 10_000  # characters of a pattern
MAX_STEPS = 2_000_000  # parts of patterns that are applied to names of SPAN characters
SPAN = 1_000_000


class InvalidPattern(ValueError):
    """A regular expression that cannot be applied; says why."""


class NameMatcher:
    """Matches patterns against names. All patterns of a matcher together may take MAX_STEPS steps."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._left = names, MAX_STEPS
        # a place behind each name is the position of its end
        text = np.array([ord(character) for name in names for character in f"{name} "], np.uint32)
        behind = np.cumsum([0, *(len(name) + 1 for name in names)])
        self._first, self._spans = behind[:-1], 1 + len(text) // SPAN
        ends = np.zeros(len(text), bool)
        ends[behind[1:] - 1] = True
        self._every, self._ends = (1 << len(text)) - 1, _integer(ends)
        self._starts = (self._ends << 1 | 1) & self._every
        self._characters = {chr(code): _integer((text == code) & ~ends) for code in np.unique(text)}
        word = self._of(character for character in self._characters if re.match(r"\w", character))
        self._boundaries = (word ^ word << 1) & self._every
        # in an empty text, a place is neither a boundary nor none, until Python 3.14
        self._empty = self._starts & self._ends if sys.version_info < (3, 14) else 0
        self._classes: dict[int, int] = {}  # by id, of the pattern that is being matched

    def full_matches(self, pattern: str) -> set[str]:
        """The names that a pattern matches from start to end, as `re.fullmatch` does.

        Raises:
            InvalidPattern: it is no regular expression, has a part that is not supported, is longer than
                MAX_LENGTH, or all patterns together take too long.
        """
        if len(pattern) > MAX_LENGTH:
            raise InvalidPattern(f"has {len(pattern)} characters, more than {MAX_LENGTH}")
        self._classes.clear()
        try:
            parsed = parser.parse(pattern)
            if parsed.state.flags & ~re.UNICODE:
                raise InvalidPattern("flags are not supported")
            # from the ends: a set of positions does not say in which of the names a match began
            matching = self._sequence(parsed, self._ends, back=True) & self._starts
        except (re.error, OverflowError) as error:
            raise InvalidPattern(f"is no regular expression: {error}") from None
        except RecursionError:
            raise InvalidPattern("has groups in too many groups") from None
        digits = np.frombuffer(matching.to_bytes(self._every.bit_length() // 8 + 1, "little"), np.uint8)
        [numbers] = np.nonzero(np.unpackbits(digits, bitorder="little")[self._first])
        return {self._names[number] for number in numbers}

    def _sequence(self, parts: Any, at: int, *, back: bool) -> int:
        """The positions that matches of all parts, one after the other, lead to from positions `at`; or, if
        back, from which they lead there.
        """
        for code, argument in reversed(parts) if back else parts:
            if not at:
                break
            at = self._part(code, argument, at, back)
        return at

    def _part(self, code: Any, argument: Any, at: int, back: bool) -> int:
        self._left -= self._spans
        if self._left < 0:
            raise InvalidPattern("takes too long")
        if code in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            here = self._matching(code, argument)
            return at >> 1 & here if back else (at & here) << 1
        if code is codes.BRANCH:
            reached = 0
            for branch in argument[1]:
                reached |= self._sequence(branch, at, back=back)
            return reached
        if code is codes.SUBPATTERN:
            _, added, removed, parts = argument
            if added or removed:
                raise InvalidPattern("flags are not supported")
            return self._sequence(parts, at, back=back)
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, limit, item = argument
            return self._repeated(least, limit, item, at, back)
        if code in (codes.ASSERT, codes.ASSERT_NOT):
            direction, parts = argument
            true = self._sequence(parts, self._every, back=direction > 0)
            return at & (true if code is codes.ASSERT else ~true)
        if code is codes.AT:
            return at & self._at(argument)
        raise InvalidPattern(f"{str(code).lower()} is not supported")

    def _repeated(self, least: int, limit: int, parts: Any, at: int, back: bool) -> int:
        for _ in range(least):
            after = self._sequence(parts, at, back=back)
            if after == at:
                break
            at = after
        reached = new = at
        for _ in range(limit - least):
            new = self._sequence(parts, new, back=back) & ~reached
            if not new:
                break
            reached |= new
        return reached

    def _at(self, where: Any) -> int:
        if where in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
            return self._starts
        if where is codes.AT_END:  # also before a line break at the end
            return self._ends | self._ends >> 1 & self._characters.get("\n", 0)
        if where is codes.AT_END_STRING:
            return self._ends
        if where is codes.AT_BOUNDARY:
            return self._boundaries
        return self._every & ~self._boundaries & ~self._empty

    def _matching(self, code: Any, argument: Any) -> int:
        """The positions of characters that a part for a single character matches."""
        if code is codes.ANY:
            return self._every & ~self._ends & ~self._characters.get("\n", 0)
        if code is codes.LITERAL:
            return self._characters.get(chr(argument), 0)
        if code is codes.NOT_LITERAL:
            return self._every & ~self._ends & ~self._characters.get(chr(argument), 0)
        if id(argument) not in self._classes:
            self._classes[id(argument)] = self._class(argument)
        return self._classes[id(argument)]

    def _class(self, items: Any) -> int:
        negated = items[0][0] is codes.NEGATE
        here = self._of(
            character
            for character in self._characters
            if any(_is_in(ord(character), *item) for item in items[negated:])
        )
        return self._every & ~self._ends & ~here if negated else here

    def _of(self, characters: Iterable[str]) -> int:
        here = 0
        for character in characters:
            here |= self._characters[character]
        return here


def _integer(positions: np.ndarray) -> int:
    """With a bit for each True."""
    return int.from_bytes(np.packbits(positions, bitorder="little").tobytes(), "little")


CATEGORIES = {
    codes.CATEGORY_DIGIT: re.compile(r"\d"),
    codes.CATEGORY_NOT_DIGIT: re.compile(r"\D"),
    codes.CATEGORY_SPACE: re.compile(r"\s"),
    codes.CATEGORY_NOT_SPACE: re.compile(r"\S"),
    codes.CATEGORY_WORD: re.compile(r"\w"),
    codes.CATEGORY_NOT_WORD: re.compile(r"\W"),
}


def _is_in(character: int, code: Any, argument: Any) -> bool:
    """Whether an item of a class of characters has this one."""
    if code is codes.LITERAL:
        return bool(character == argument)
    if code is codes.RANGE:
        return bool(argument[0] <= character <= argument[1])
    return CATEGORIES[argument].match(chr(character)) is not None
