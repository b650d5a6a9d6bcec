"""Writes what `jengine plan` prints today into docs/recipes.md, below each such command: `python
tools/recipe_plans.py`.

The commands name models of the Hugging Face Hub. Their config.json files are in tests/data.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from jengine.cli import _parser

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "recipes.md"
BLOCK = re.compile(r"(?<=^```console\n)\$ jengine (plan [^\n]+)\n.*?(?=^```$)", re.M | re.S)
FOLDERS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m-instruct",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "google/gemma-3-27b-it": "gemma-3-27b-it",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.1-70b",  # the shapes are the same
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
HIDDEN = re.compile(r"(temporaries|slots and counts|margin|free|limit|8|128) ")


def with_plans(text: str) -> str:
    """The page with the output of its commands `jengine plan`."""
    return BLOCK.sub(lambda block: f"$ jengine {block[1]}\n{excerpt(planned(block[1]))}\n", text)


def planned(command: str) -> str:
    """What a command prints. Raises KeyError for a model that FOLDERS lacks."""
    words = shlex.split(command)
    [model] = [word for word in words if "/" in word and not word[0].isdigit()]
    folder = str(ROOT / "tests" / "data" / FOLDERS[model])
    options = _parser().parse_args([folder if word == model else word for word in words] + ["--quiet"])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        options.run(options)
    return said.getvalue().replace(folder, model)


def excerpt(plan: str) -> str:
    """A plan without rows of less interest, speeds of prefill, and assumptions."""
    *parts, verdict = plan.rstrip("\n").split("\n\n")
    shown = ["\n".join(line for line in part.splitlines() if not HIDDEN.match(line)) for part in parts]
    return "\n\n".join(
        [*(part for part in shown if not part.startswith("prefill")), verdict.splitlines()[-1]]
    )


if __name__ == "__main__":
    PAGE.write_text(with_plans(PAGE.read_text()))
