"""One peer at one precision, in a separate process: from its start to its first token, then the requested
measurements.

Run by compare.py under the peer's own Python, with a task in JSON on standard input. A peer's module has a
class Engine:

    Engine(folder: Path, precision: str, limits: Limits)
    engine.generate(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]

`generate` answers prompts of token ids greedily with exactly these numbers of tokens, all prompts at once.
Engines do not share prefixes between prompts. An engine that must be closed has close(). One whose start
continues after its first token has settle(). A task may have further `options` of the engine, and a measure
`sampling` arguments of `generate`; only jengine and vLLM take these.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()  # the common clock of all processes of a machine

import ctypes  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from importlib.metadata import version  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Protocol  # noqa: E402


@dataclass(frozen=True)
class Limits:
    """Limits of the requests, for sizing the engine: concurrent sequences and tokens of each; a folder for
    files; and further options of the engine.
    """

    sequences: int
    tokens: int
    threads: int
    cache: Path
    options: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    def generate(self, prompts: list[list[int]], outputs: list[int], **sampling: Any) -> list[list[int]]: ...


def timed(engine: Engine, prompts: list[list[int]], outputs: list[int], **sampling: Any) -> float:
    """Seconds for these requests."""
    before = time.perf_counter()
    answers = engine.generate(prompts, outputs, **sampling)
    seconds = time.perf_counter() - before
    if [len(answer) for answer in answers] != outputs:
        raise ValueError(f"asked for {outputs} tokens, given {[len(answer) for answer in answers]}")
    return seconds


def stream(engine: Engine, task: dict[str, Any]) -> list[float]:
    """Decode tokens a second of one sequence, without the first token."""
    tokens = task["tokens"]
    return [
        (tokens - 1) / (timed(engine, [prompt], [tokens]) - timed(engine, [prompt], [1]))
        for prompt in task["prompts"]
    ]


def batch(engine: Engine, task: dict[str, Any]) -> list[float]:
    """Output tokens a second of requests that are all present at the start."""
    outputs = task["outputs"]
    return [sum(outputs) / timed(engine, task["prompts"], outputs, **task.get("sampling", {}))]


def prefill(engine: Engine, task: dict[str, Any]) -> list[float]:
    """Prompt tokens a second, one prompt at a time."""
    return [len(prompt) / timed(engine, [prompt], [1]) for prompt in task["prompts"]]


def check(engine: Engine, task: dict[str, Any]) -> list[list[int]]:
    """Tokens for comparison."""
    return engine.generate(task["prompts"], task["outputs"])


def warm_up(engine: Engine, task: dict[str, Any]) -> list[float]:
    """A shorter version of the other measurements, since the first steps of a process are slower."""
    return [timed(engine, prompts, [task["tokens"]] * len(prompts)) for prompts in task["batches"]]


def gaps(engine: Any, task: dict[str, Any]) -> list[list[float]]:
    """Only for the reference: the lead of each token over the next best one."""
    return engine.gaps(task["prompts"], task["outputs"])


MEASURES: dict[str, Callable[[Engine, dict[str, Any]], list[Any]]] = {
    "check": check,
    "gaps": gaps,
    "warm up": warm_up,
    "stream": stream,
    "batch": batch,
    "prefill": prefill,
}


def main() -> None:
    if sys.platform == "linux":  # this process ends with the one that has started it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    task = json.load(sys.stdin)
    result: dict[str, Any] = {"started": STARTED, "measured": {}, "failed": {}}

    def note() -> None:
        new = Path(task["result"] + ".new")  # it may be read at any time
        new.write_text(json.dumps(result))
        new.replace(task["result"])

    module = importlib.import_module(f"benchmarks.peers.{task['module']}")
    limits = Limits(
        task["sequences"], task["tokens"], task["threads"], Path(task["cache"]), task.get("options", {})
    )
    engine: Engine = module.Engine(Path(task["folder"]), task["precision"], limits)
    engine.generate([task["first"]], [1])
    result["first_token"] = time.monotonic()
    result["versions"] = {name: version(name) for name in task["packages"]}
    note()
    if hasattr(engine, "settle") and task.get("settle", True):
        engine.settle()
    for name, work in task["measures"].items():
        try:
            result["measured"][name] = MEASURES[work.get("measure", name)](engine, work)
        except Exception as error:  # if a peer fails at one measurement, the others continue
            traceback.print_exc()
            result["failed"][name] = f"{type(error).__name__}: {error}"
        note()
    if hasattr(engine, "close"):
        engine.close()


if __name__ == "__main__":
    main()
