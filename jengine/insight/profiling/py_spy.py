"""Stacks of threads sampled by py-spy, if it is installed, from outside the process and without blocking
it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from jengine.insight.profiling.data import Flame
from jengine.insight.profiling.tools import Tool, installed

THREAD = re.compile(r"thread \((?:0x)?[0-9a-fA-F]+\)(?:: )?\"?(.*?)\"?$")


class PySpy:
    """Samples from `start` until `stop`.

    Attributes:
        why: the reason why it could not sample; empty if it could.
    """

    def __init__(self, rate: int, folder: Path) -> None:
        self._rate, self._folder = rate, folder
        self._tool: Tool | None = None
        self.why = ""

    def start(self) -> None:
        program = installed("py-spy")
        if not program:
            self.why = "py-spy is not installed (the extra `profile` has it)"
            return
        options = [
            "--format",
            "raw",
            "--threads",
            "--nonblocking",
            "--rate",
            str(self._rate),
            "--duration",
            "unlimited",
        ]
        self._tool = Tool(
            [program, "record", "--pid", "{pid}", *options, "--output", "{file}"], self._folder / "py-spy"
        )

    def stop(self, hidden: Collection[str]) -> list[Flame]:
        """Flames by thread, without hidden threads; empty if it could not sample."""
        if self._tool is None:
            return []
        flames = parse_raw(self._tool.stop())
        if not flames:
            self.why = f"py-spy returned no samples: {self._tool.why or 'no thread ran'}"
        return [flame for flame in flames if flame.thread not in hidden]


def parse_raw(text: str) -> list[Flame]:
    """Parses py-spy's raw format: a line for each stack with the thread, the frames from the root, and the
    count.
    """
    threads: dict[str, dict[str, int]] = defaultdict(dict)
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        first, _, frames = stack.partition(";")
        found = THREAD.match(first)
        if found and frames and count.isdigit():
            threads[found[1] or first][frames] = threads[found[1] or first].get(frames, 0) + int(count)
    return [Flame(thread, stacks) for thread, stacks in threads.items()]
