"""From process start to first token, in a fresh process: the first start, which compiles, and later ones, which load.

    python -m benchmarks.start_time [--models demo 134m] [--repeat 3] [--quick]

Each model has a cache folder of its own, empty at first. A later start is the median of `--repeat`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.machine import ROOT, made_model, save

GOALS = {"demo": 5.0, "134m": 8.0}  # seconds, of a later start
PROMPT = "def fibonacci(n):"


def child(model: str, cache_dir: str) -> None:
    """What a user's process does: import, load, ask for a token. Prints its marks on the clock that all processes share."""
    marks = {"python": time.monotonic()}
    from jengine import LLM, SamplingParams

    marks["import"] = time.monotonic()
    llm = LLM(model, progress=False, cache_dir=cache_dir)
    marks["start"] = time.monotonic()
    next(llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=4)))
    marks["first token"] = time.monotonic()
    print(json.dumps({"marks": marks, "stats": llm.stats}))


def start(model: str, cache_dir: str) -> dict[str, Any]:
    """Seconds of one start, by part."""
    code = f"from benchmarks.start_time import child; child({model!r}, {cache_dir!r})"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
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
    }


def measure(name: str, repeat: int) -> dict[str, Any]:
    model = name if name == "demo" else str(made_model(name))
    with tempfile.TemporaryDirectory() as cache_dir:
        first = start(model, cache_dir)
        later = [start(model, cache_dir) for _ in range(repeat)]
    assert first["programs_loaded"] == 0 and all(run["programs_compiled"] == 0 for run in later)
    medians = {part: round(statistics.median(run["parts"][part] for run in later), 3) for part in first["parts"]}
    seconds = statistics.median(run["seconds"] for run in later)
    print(f"\n{name}: {first['programs_compiled']} programs; seconds from process start to first token\n\n{'':16}{'first':>8}{'later':>8}")
    for part, took in first["parts"].items():
        print(f"{part:16}{took:8.2f}{medians[part]:8.2f}")
    print(f"{'all':16}{first['seconds']:8.2f}{seconds:8.2f}   the goal is {GOALS[name]:.0f}")
    return {"first": first, "later": {"seconds": seconds, "parts": medians, "runs": later}, "goal": GOALS[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="demo only, one later start, nothing saved")
    options = parser.parse_args()
    models, repeat = (["demo"], 1) if options.quick else (options.models, options.repeat)
    results = {name: measure(name, repeat) for name in models}
    if not options.quick:
        save("start_time", {"models": results})


if __name__ == "__main__":
    main()
