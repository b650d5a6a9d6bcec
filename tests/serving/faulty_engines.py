"""Engines for engine processes that go wrong: functions as in serving/engines.py, called in the child."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import jengine
from jengine import InvalidArgument, Tokenizer
from jengine.serving.engines import Made, mock_engine
from jengine.serving.mock_engine import MockEngine
from jengine.serving.wire import EngineInfo

FACTS = EngineInfo(tokenizer_folder=None, dtype="", devices="")


def refuses(error: str, text: str) -> Made:
    """Cannot start."""
    raise InvalidArgument("max_model_len", 10**30, text) if error == "InvalidArgument" else getattr(jengine, error, RuntimeError)(text)


def exits(code: int) -> Made:
    """Does not come to say why."""
    os._exit(code)


def starts_slowly(mark: str) -> Made:
    """Says in a file that it has begun, and is not done within a test."""
    Path(mark).write_text(str(os.getpid()))
    time.sleep(3600)
    raise AssertionError


class Babbling(MockEngine):
    """Its fifth step writes on the socket."""

    def step(self) -> Any:
        if self.steps == 4:
            os.write(int(sys.argv[1]), b"\xff" * 64)
        return super().step()


def babbles(**options: Any) -> Made:
    return Made(Babbling(**options), None, FACTS)


def starts_once(mark: str, **options: Any) -> Made:
    """The mock engine, unless the file exists."""
    if Path(mark).exists():
        raise OSError("the device is not free yet")
    Path(mark).touch()
    return mock_engine(**options)


class NoVocabulary(Tokenizer):
    """Has no text, so that structured output, which needs the whole vocabulary, and bad words fail."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise OSError("the vocabulary is gone")


def cannot_mask(tokenizer_folder: str, **options: Any) -> Made:
    made = mock_engine(tokenizer_folder, **options)
    return made._replace(tokenizer=NoVocabulary.load(Path(tokenizer_folder)))


def starts_late(seconds: float) -> Made:
    """The mock engine, after this time."""
    time.sleep(seconds)
    return mock_engine()


def slow_but_known(seconds: float) -> Made:
    """Its warm-up has shown how long a step takes."""
    made = mock_engine(seconds=seconds)
    return made._replace(info=EngineInfo(tokenizer_folder=None, dtype="", devices="", longest_step=seconds))
