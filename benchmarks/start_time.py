"""From process start to first token, in a new process: first starts, which compile, and later ones, which
load programs.

    python -m benchmarks.start_time [--models demo 134m smollm2] [--repeat 5] [--warm-up all] [--quick]

A first start has an empty cache; a later one finds the whole table. Results are medians of `--repeat`. So is
what `jengine generate` takes with saved programs, in processor time, and from its last token to its end. With
progressive warm-up, the process between them continues with 16 concurrent streams until every program is
ready, and for the same number of rounds afterwards: tokens/s of both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.machine import ROOT, add, made_model
from tools.smollm2 import smollm2

# seconds of a first and a later start
GOALS = {"demo": (3.0, 0.8), "134m": (12.0, 4.0), "smollm2": (4.0, 1.5)}
END_GOAL = 0.2  # seconds from a command's last token to its end
PROMPT = "def fibonacci(n):"
STREAMS, TOKENS = 16, 32


def child(model: str, cache_dir: str, warm_up: str, widen: bool) -> None:
    """A typical user's process: import, load, request a token. Prints its times on the clock that all
    processes share.
    """
    marks = {"python": time.monotonic()}
    from jengine import LLM, SamplingParams

    marks["import"] = time.monotonic()
    llm = LLM(model, progress=False, cache_dir=cache_dir, warm_up=warm_up)
    marks["start"] = time.monotonic()
    next(llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=4)))
    marks["first token"] = time.monotonic()
    stats = llm.stats
    rates: list[tuple[int, float]] = []  # programs ready, tokens/s
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    while widen and sum(ready == stats["programs"] for ready, _ in rates) * 2 <= len(rates):
        ready, begun = llm.stats["programs_ready"], time.monotonic()
        llm.generate([f"{PROMPT} {n}" for n in range(STREAMS)], params, use_tqdm=False)
        rates.append((ready, STREAMS * TOKENS / (time.monotonic() - begun)))
    print(json.dumps({"marks": marks, "stats": stats, "rates": rates}))


def start(model: str, cache_dir: str, warm_up: str, *, widen: bool = False) -> dict[str, Any]:
    """Seconds of one start, by part."""
    code = f"from benchmarks.start_time import child; child({model!r}, {cache_dir!r}, {warm_up!r}, {widen!r})"
    before = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    how: dict[str, Any] = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], check=True, **how)
    told = json.loads(done.stdout.splitlines()[-1])
    marks, stats = told["marks"], told["stats"]
    parts = {
        "python": marks["python"] - before,
        "import": marks["import"] - marks["python"],
        **stats["start_seconds"],
        "first token": marks["first token"] - marks["start"],
    }
    return {
        "seconds": round(marks["first token"] - before, 2),
        "parts": {part: round(seconds, 3) for part, seconds in parts.items()},
        "programs_compiled": stats["programs_compiled"],
        "programs_loaded": stats["programs_loaded"],
        "programs": stats["programs"],
        "rates": [(ready, round(rate, 1)) for ready, rate in told["rates"]],
    }


def command(model: str, cache_dir: str) -> dict[str, float]:
    """Seconds of a `jengine generate` with saved programs: of processor time, user and system, and between
    its last output and its end.
    """
    words = ["generate", model, PROMPT, "--max-tokens", "8", "--quiet", "--cache-dir", cache_dir]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = os.times()
    with subprocess.Popen(
        [sys.executable, "-m", "jengine.cli", *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        last = time.monotonic()
        while chunk := os.read(process.stdout.fileno(), 4096):
            last = last if chunk == b"\n" else time.monotonic()  # a command ends with an empty line
        process.wait()
    after = os.times()
    processor = sum(after[2:4]) - sum(before[2:4])  # of children
    return {"processor": round(processor, 2), "end": round(time.monotonic() - last, 3)}


def measure(name: str, repeat: int, warm_up: str) -> dict[str, Any]:
    model = name if name == "demo" else str(smollm2() if name == "smollm2" else made_model(name))
    first, results = [], {}
    for run in range(repeat):
        with tempfile.TemporaryDirectory() as cache_dir:
            first.append(start(model, cache_dir, warm_up))
            if run == repeat - 1:
                between = start(model, cache_dir, warm_up, widen=True)
                later = [start(model, cache_dir, warm_up) for _ in range(repeat)]
                commands = [command(model, cache_dir) for _ in range(repeat)]
    assert all(run["programs_loaded"] == 0 for run in first) and all(
        run["programs_compiled"] == 0 for run in later
    )
    for kind, runs in ("first", first), ("later", later):
        parts = {
            part: round(statistics.median(run["parts"][part] for run in runs), 3) for part in runs[0]["parts"]
        }
        results[kind] = {
            "seconds": statistics.median(run["seconds"] for run in runs),
            "parts": parts,
            "runs": runs,
        }
    print(
        f"\n{name}: {first[0]['programs_compiled']} of {first[0]['programs']} programs; seconds from process"
        " start to first token\n"
    )
    print(f"{'':16}{'first':>8}{'later':>8}")
    for part in results["first"]["parts"]:
        print(f"{part:16}{results['first']['parts'][part]:8.2f}{results['later']['parts'][part]:8.2f}")
    first_seconds, later_seconds, goals = (
        results["first"]["seconds"],
        results["later"]["seconds"],
        GOALS[name],
    )
    print(f"{'all':16}{first_seconds:8.2f}{later_seconds:8.2f}   the goals are {goals[0]:g} and {goals[1]:g}")
    of_command = {key: statistics.median(run[key] for run in commands) for key in commands[0]}
    print(
        f"jengine generate: {of_command['processor']:.2f} s of processor time; it ends"
        f" {of_command['end']:.2f} s after its last token, the goal is {END_GOAL:g}"
    )
    widening, whole = (
        [rate for ready, rate in between["rates"] if (ready == between["programs"]) == done]
        for done in (False, True)
    )
    if widening:
        print(
            f"{STREAMS} streams while the table widens: {statistics.mean(widening):.0f} tokens/s, then"
            f" {statistics.mean(whole):.0f}"
        )
    return {**results, "between": between, "command": of_command, "goals": goals, "warm_up": warm_up}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--warm-up", choices=("progressive", "all"), default="progressive")
    parser.add_argument(
        "--quick", action="store_true", help="demo only, one start of each kind, nothing saved"
    )
    options = parser.parse_args()
    models, repeat = (["demo"], 1) if options.quick else (options.models, options.repeat)
    results = {name: measure(name, repeat, options.warm_up) for name in models}
    if not options.quick:
        add("start_time" if options.warm_up == "progressive" else "start_time_all", "models", results)


if __name__ == "__main__":
    main()
