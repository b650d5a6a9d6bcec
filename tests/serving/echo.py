"""A server whose prompt is the texts of the messages, which its mock engine repeats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.serving.conftest import MockServer, serve_mock
from tests.text.conftest import byte_level, write

# The comment tells the format of calls and thoughts.
ECHO = "{# <tool_call> </think> #}{% if enable_thinking or tools %}{% endif %}{{ reasoning_effort }}"
ECHO += "{% for m in messages %}{{ m.content }}{% endfor %}"


def echo_model(folder: Path) -> Path:
    """Writes a tokenizer with this chat template to the folder."""
    write(byte_level(), folder)
    (folder / "chat_template.jinja").write_text(ECHO)
    return folder


@contextmanager
def serve_echo(folder: Path) -> Iterator[MockServer]:
    """The server, which must be idle in the end."""
    with serve_mock(echo_model(folder), server={"port": 0}) as server:
        yield server
        server.wait_until_idle()
