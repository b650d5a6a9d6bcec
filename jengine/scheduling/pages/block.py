"""A block: the tokens of a page, their prefix, and where their keys and values are."""

from __future__ import annotations

from typing import NamedTuple


class LoraSalt(NamedTuple):
    """The salt of a sequence with an adapter: the number of its loading, its name, and the request's own
    salt.
    """

    number: int
    name: str
    salt: str | None


Salt = str | LoraSalt | None  # of a sequence


class Block:
    """The tokens of one page after a given prefix, and the pages that hold their keys and values.

    Attributes:
        parent: the preceding block; the salt, for the first block of a sequence.
        pages: page numbers by cache group; 0: none.
        users: number of following blocks, sequences that will add one, and copies on the host.
        digest: of the tokens and the prefix, for other engines; see engine/page_names.py. None: not computed.
    """

    __slots__ = ("digest", "pages", "parent", "tokens", "users")

    def __init__(self, parent: Block | Salt, tokens: tuple[int, ...], groups: int) -> None:
        self.parent, self.tokens = parent, tokens
        self.pages = [0] * groups
        self.users = 0
        self.digest: bytes | None = None
