"""Faulty engines for engine processes: functions as in processes/engines.py, called in the child."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jengine
from jengine import InvalidArgument, Tokenizer
from jengine.serving.calls.model_provider import EngineInfo
from jengine.serving.processes.engines import WarmEngine
from jengine.spi import Request
from tests.mocks.mock_engine import MockEngine, mock_engine

FACTS = EngineInfo(tokenizer_folder=None, dtype="", devices="")


def refuses(error: str, text: str) -> WarmEngine:
    """Raises an error at the start."""
    raise (
        InvalidArgument("max_model_len", 10**30, text)
        if error == "InvalidArgument"
        else getattr(jengine, error, RuntimeError)(text)
    )


def exits(code: int) -> WarmEngine:
    """Exits without an error message."""
    os._exit(code)


def starts_slowly(mark: str) -> WarmEngine:
    """Creates a file when it starts, and does not finish within a test."""
    Path(mark).write_text(str(os.getpid()))
    time.sleep(3600)
    raise AssertionError


class Babbling(MockEngine):
    """Writes to the socket in its fifth step."""

    def step(self) -> Any:
        if self.steps == 4:
            os.write(int(sys.argv[1]), b"\xff" * 64)
        return super().step()


def babbles(**options: Any) -> WarmEngine:
    return WarmEngine(Babbling(**options), None, FACTS)


class Picky(MockEngine):
    """Fails for prompts that begin with token 13, after queueing some of their requests."""

    def add(self, *requests: Request) -> None:
        super().add(*requests[:-1] if requests[0].prompt_token_ids[0] == 13 else requests)
        if requests[0].prompt_token_ids[0] == 13:
            raise OverflowError("too odd a number")


def picky(**options: Any) -> WarmEngine:
    return WarmEngine(Picky(**options), None, FACTS)


def starts_once(mark: str, **options: Any) -> WarmEngine:
    """The mock engine, unless the file exists."""
    if Path(mark).exists():
        raise OSError("the device is not free yet")
    Path(mark).touch()
    return mock_engine(**options)


class NoVocabulary(Tokenizer):
    """Has no text, so structured output, which needs the whole vocabulary, and bad words fail."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise OSError("the vocabulary is gone")


def cannot_mask(tokenizer_folder: str, **options: Any) -> WarmEngine:
    made = mock_engine(tokenizer_folder, **options)
    return made._replace(tokenizer=NoVocabulary.load(Path(tokenizer_folder)))


def starts_late(seconds: float) -> WarmEngine:
    """The mock engine, after a delay."""
    time.sleep(seconds)
    return mock_engine()


def starts_in_steps(report: Callable[[str, str, int, int], None], mark: str, **options: Any) -> WarmEngine:
    """The mock engine, after a file exists; says meanwhile that it compiles."""
    for done in range(4):
        report("compiling", "program", done, 9)
        time.sleep(0.25)  # longer than between two reports
    while not Path(mark).exists():
        time.sleep(0.01)
    return mock_engine(**options)


def slow_but_known(seconds: float) -> WarmEngine:
    """Its warm-up has measured the duration of a step."""
    made = mock_engine(seconds=seconds)
    return made._replace(info=EngineInfo(tokenizer_folder=None, dtype="", devices="", longest_step=seconds))
