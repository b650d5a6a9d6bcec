"""The form of the server's log: what clients name cannot forge lines."""

from __future__ import annotations

import logging

import pytest

from jengine.serving.logs import Lines


@pytest.mark.parametrize(
    "name, shown",
    [
        ("sql", "sql"),
        ("größe 🙂", "größe 🙂"),
        ("a\n2026-01-01 ERROR forged", "a\n    2026-01-01 ERROR forged"),
        ("\x1b[2J\r\0", "\\x1b[2J\\r\\x00"),
        ("\u202ereversed\u2028", "\\u202ereversed\\u2028"),
    ],
)
def test_lines(name: str, shown: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "file", 1, "%s was loaded", (name,), None)
    assert Lines("%(levelname)s %(message)s").format(record) == f"INFO {shown} was loaded"
