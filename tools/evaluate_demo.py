"""Sample the demo model with the engine, and record how much of its output is valid Python.

    python tools/evaluate_demo.py [DIR]

Generates 100 completions from the beginning-of-sequence token alone, with seeds 0 to 99. The record gets the
share that `ast.parse` accepts, the share that ended with the end-of-sequence token, and two samples for
people to read.
"""

from __future__ import annotations

import ast
import json
import sys
import warnings
from pathlib import Path

import jengine

SAMPLES = 100


def parses(text: str) -> bool:
    """Whether the text is valid Python with at least one statement."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about invalid escapes in strings
            return bool(ast.parse(text).body)
    except (SyntaxError, ValueError):
        return False


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "jengine/demo")
    llm = jengine.LLM(str(folder))
    params = [
        jengine.SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=None)
        for seed in range(SAMPLES)
    ]
    outputs = [output.outputs[0] for output in llm.generate([[0]] * SAMPLES, params)]
    good = [output for output in outputs if output.finish_reason == "stop" and parses(output.text)]
    record = json.loads((folder / "training.json").read_text())
    record["samples"] = {
        "count": SAMPLES,
        "sampling": "temperature 0.8, top_p 0.95, seeds 0 to 99, from <s> alone",
        "parsed_by_ast": sum(parses(output.text) for output in outputs) / SAMPLES,
        "ended_by_themselves": sum(output.finish_reason == "stop" for output in outputs) / SAMPLES,
        "mean_tokens": sum(len(output.token_ids) for output in outputs) / SAMPLES,
        "two_of_them": [
            output.text for output in sorted(good, key=lambda o: abs(len(o.token_ids) - 120))[:2]
        ],
    }
    (folder / "training.json").write_text(json.dumps(record) + "\n")
    print(json.dumps({**record["held_out"], **record["samples"]}, indent=1))


if __name__ == "__main__":
    main()
