"""`jengine generate --input` with a mock engine, in this process or in a separate one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jengine
from jengine import AsyncLLM, Tokenizer
from jengine.api.backend import EngineThread
from tests.mocks.mock_engine import MockEngine
from tests.text.conftest import byte_level, write

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}<s>assistant:{% endif %}"
)
CODE = """
import sys
from pathlib import Path
import jengine
from jengine import AsyncLLM, EngineThread, Tokenizer, cli
from tests.mocks.mock_engine import MockEngine

def make(model, **_):
    engine = MockEngine(vocab_size=501, max_num_seqs=8, seconds=0.002)
    return AsyncLLM.over(EngineThread(engine), Tokenizer.load(Path(model)))

jengine.AsyncLLM = make
sys.exit(cli.main(sys.argv[1:]))
"""


def make_tokenizer(folder: Path) -> Path:
    write(byte_level(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def use_mock(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[MockEngine]:
    """Makes commands of this process use a mock engine, with MODEL as the tokenizer's folder. Yields the list
    of created engines."""
    engines: list[MockEngine] = []

    def make(model: str, **_: Any) -> AsyncLLM:
        engines.append(MockEngine(**{"vocab_size": 501, **options}))
        return AsyncLLM.over(EngineThread(engines[-1]), Tokenizer.load(Path(model)))

    monkeypatch.setattr(jengine, "AsyncLLM", make, raising=False)
    return engines


def start(*arguments: str) -> subprocess.Popen[str]:
    """Starts a process that runs the command with a mock engine."""
    return subprocess.Popen([sys.executable, "-c", CODE, *arguments], stderr=subprocess.PIPE, text=True)
