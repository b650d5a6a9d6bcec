"""The form of the server's log."""

from __future__ import annotations

import logging


class Lines(logging.Formatter):
    """Clients' names and paths cannot forge lines or control a terminal: characters that are not printed are
    escaped, and further lines of a message are indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)


def escaped(text: str) -> str:
    if text.isprintable():
        return text
    lines = text.split("\n")
    return "\n    ".join(
        "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)
        for line in lines
    )
