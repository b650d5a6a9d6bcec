"""Sample the demo model through the engine and add to its record how much of what it writes is Python.

    python tools/evaluate_demo.py [DIR]

100 completions of nothing but the beginning-of-sequence token, seeds 0 to 99: the share that `ast.parse` accepts, and
the share that ended by themselves. Two samples are kept, for people to look at.
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
    """Whether it is Python, and something at all."""
    try:
        with warnings.catch_warnings(action="ignore"):  # odd escapes in strings
            return bool(ast.parse(text).body)
    except (SyntaxError, ValueError):
        return False


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "jengine/demo")
    llm = jengine.LLM(str(folder))
    params = [jengine.SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=None) for seed in range(SAMPLES)]
    outputs = [output.outputs[0] for output in llm.generate([[0]] * SAMPLES, params)]
    good = [output for output in outputs if output.finish_reason == "stop" and parses(output.text)]
    record = json.loads((folder / "training.json").read_text())
    record["samples"] = {
        "count": SAMPLES,
        "sampling": "temperature 0.8, top_p 0.95, seeds 0 to 99, from <s> alone",
        "parsed_by_ast": sum(parses(output.text) for output in outputs) / SAMPLES,
        "ended_by_themselves": sum(output.finish_reason == "stop" for output in outputs) / SAMPLES,
        "mean_tokens": sum(len(output.token_ids) for output in outputs) / SAMPLES,
        "two_of_them": [output.text for output in sorted(good, key=lambda o: abs(len(o.token_ids) - 120))[:2]],
    }
    (folder / "training.json").write_text(json.dumps(record) + "\n")
    print(json.dumps({**record["held_out"], **record["samples"]}, indent=1))


if __name__ == "__main__":
    main()
