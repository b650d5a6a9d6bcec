"""The form of the log's lines, and lines every few seconds: what the start does, and what the engine does."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import NamedTuple, Protocol

from jengine import EngineDead, Load
from jengine.serving.processes.supervisor import NOT_LOADED
from jengine.spi import StepTotals

SECONDS = 10.0  # between two lines

log = logging.getLogger("jengine.serving")


class StatusSource(Protocol):
    """What the log is about: a Supervisor. `load` and `totals` raise EngineDead while no engine is
    running.
    """

    @property
    def load(self) -> Load: ...

    @property
    def totals(self) -> StepTotals: ...

    @property
    def generated(self) -> int: ...

    @property
    def why_not_ready(self) -> str: ...


class StatusSample(NamedTuple):
    """The state at one time. Counters never decrease.

    Attributes:
        at: monotonic seconds.
        prompt_tokens: computed so far; tokens from the prefix cache do not count.
        generated: tokens generated so far.
    """

    at: float
    load: Load
    prompt_tokens: int
    generated: int


def sample(engine: StatusSource) -> StatusSample:
    """Raises EngineDead while no engine is running."""
    return StatusSample(time.monotonic(), engine.load, engine.totals.prompt_tokens, engine.generated)


def line(before: StatusSample, now: StatusSample) -> str | None:
    """Describes the time between two samples; None if nothing happened."""
    load, old = now.load, before.load
    prompt, generated = now.prompt_tokens - before.prompt_tokens, now.generated - before.generated
    parts = []
    if prompt or generated or load.running or load.waiting:
        seconds = max(now.at - before.at, 1e-9)
        looked_up, hits = load.prefix_queries - old.prefix_queries, load.prefix_hits - old.prefix_hits
        parts = [
            f"running: {load.running}, waiting: {load.waiting}",
            f"prompt: {prompt / seconds:.1f} tokens/s",
            f"generation: {generated / seconds:.1f} tokens/s",
            f"KV cache: {100 * (load.pages - load.free_pages) / max(load.pages, 1):.1f} %",
            f"prefix hits: {100 * hits / looked_up:.1f} %" if looked_up else "prefix hits: none looked up",
        ]
    if load.programs_ready != old.programs_ready:
        some = "all" if load.programs_ready == load.programs else f"{load.programs_ready} of"
        parts.append(f"{some} {load.programs} programs are ready")
    return "; ".join(parts) or None


async def write_status(engine: StatusSource, seconds: float = SECONDS, name: str = "") -> None:
    """Writes lines until it is cancelled; each begins with the model's name, if that is given.

    While the engine starts there is a line only without a terminal, which shows progress bars instead.
    """
    before: StatusSample | None = None
    begin = name and f"{name}: "
    while True:
        try:
            now = sample(engine)
            if text := before and line(before, now):
                log.info("%s%s", begin, text)
            before = now
        except EngineDead:
            before = None
            if not sys.stderr.isatty() and (why := engine.why_not_ready) != NOT_LOADED:
                log.info("%s%s", begin, why)
        await asyncio.sleep(seconds)


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
        "".join(
            character if character.isprintable() else character.encode("unicode_escape").decode()
            for character in line
        )
        for line in lines
    )
