"""Matches regular expressions of untrusted files against names, in bounded time.

Python's `re` backtracks and holds the interpreter meanwhile: a short pattern can stop a process for hours. So
another process matches, within SECONDS of processor time.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence

MAX_LENGTH = 10_000  # characters of a pattern
SECONDS = 2  # of processor time, for all patterns of a call
SCRIPT = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    try:
        match = re.compile(pattern).fullmatch
        result = [number for number, name in enumerate(names) if match(name)]
    except (re.error, OverflowError, RecursionError) as error:
        result = str(error)
    print(json.dumps(result), flush=True)
"""


class InvalidPattern(ValueError):
    """A regular expression that cannot be applied; says why.

    Attributes:
        number: its place among the patterns.
    """

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


def full_matches(patterns: Sequence[str], names: Sequence[str]) -> list[set[str]]:
    """The names that each pattern matches from start to end, as `re.fullmatch` does.

    Raises:
        InvalidPattern: one is no regular expression, is longer than MAX_LENGTH, or takes too long.
    """
    if not patterns:
        return []
    for number, pattern in enumerate(patterns):
        if len(pattern) > MAX_LENGTH:
            raise InvalidPattern(number, f"has {len(pattern)} characters, more than {MAX_LENGTH}")
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "ignore", "-c", SCRIPT, str(SECONDS)],
        input=json.dumps([patterns, names]),
        capture_output=True,
        text=True,
    )
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    for number, result in enumerate(results):
        if isinstance(result, str):
            raise InvalidPattern(number, f"is no regular expression: {result}")
    if len(results) < len(patterns):
        slow = ended.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        why = "takes too long" if slow else f"cannot be matched: {ended.stderr.strip()[-200:]}"
        raise InvalidPattern(len(results), why)
    return [{names[number] for number in result} for result in results]
