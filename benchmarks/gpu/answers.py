"""The demo model on this device: its log probabilities compared with those of float32 on a CPU.

The device generates from several prompts. A CPU then scores the same tokens, so prefill and decode are
compared position by position, wherever two greedy texts diverge.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.gpu.programs import missing_modules
from benchmarks.gpu.rows import FAILED, ROOT, Row, attempt, skipped

PROMPTS = (
    "class Stack:",
    "import re\n",
    "def read(path):\n    with open(path) as file:\n",
    "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv:\n        if not os.path.exists(name):",
    '"""Tests for the queue."""\n\nimport unittest\n\n\nclass QueueTest(unittest.TestCase):\n',
)
LONG = "\n".join(PROMPTS) * 4  # several tiles and pages
TOKENS = 96
LIMITS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 272}


class Form(NamedTuple):
    """Options, and the allowed mean error of log probabilities.

    A CPU's mean error is 0.010 in bfloat16, and 0.050 with weights and cache in eight bits.
    """

    name: str
    options: dict[str, Any]
    allowed: float


FORMS = (
    Form("bfloat16", {}, 0.02),
    Form("bfloat16, batch invariant", {"batch_invariant": True}, 0.02),
    Form("int8 weights, fp8 cache", {"quantization": "int8", "kv_cache_dtype": "fp8"}, 0.1),
)


def measure(small: bool) -> Iterator[Row]:
    """Yields rows for each form: the start, errors, and how many answers are equal alone and together."""
    missing = missing_modules()
    if missing is not None:
        yield skipped("jengine", missing)
        return
    forms, prompts, tokens = (FORMS[:1], PROMPTS[:2], 8) if small else (FORMS, (*PROMPTS, LONG), TOKENS)
    for form in forms:
        yield from of_form(form, prompts, tokens)


def of_form(form: Form, prompts: Sequence[str], tokens: int) -> Iterator[Row]:
    from jengine import LLM, SamplingParams

    made: list[LLM] = []

    def start() -> Row:
        begin = time.perf_counter()
        made.append(LLM("demo", dtype="bfloat16", num_pages=320, **LIMITS, **form.options))
        made[0].wait_until_compiled()
        return Row(f"{form.name}: start", {"s": time.perf_counter() - begin}, outcome="ok")

    yield attempt(f"{form.name}: start", start)
    if not made:
        return
    every = {"max_tokens": tokens, "logprobs": 1}
    scored = SamplingParams(temperature=0.0, prompt_logprobs=1, ignore_eos=True, **every)
    ways = {
        "greedy": SamplingParams(temperature=0.0, **every),
        "sampled": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=7, **every),
    }
    with made[0] as llm:
        case = f"{form.name}: errors of log probabilities"
        yield attempt(case, partial(_errors, case, llm, prompts, scored, form.allowed))
        for name, params in ways.items():
            case = f"{form.name}: {name}, alone and together"
            yield attempt(
                case, partial(_alone, case, llm, prompts, params, "batch_invariant" in form.options)
            )


def _errors(case: str, llm: Any, prompts: Sequence[str], params: Any, allowed: float) -> Row:
    """Compares log probabilities of prompts and of generated tokens with a CPU's."""
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    truth = computed_on_cpu(
        "benchmarks.gpu.answers", [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    )
    parts: dict[str, list[float]] = {"prompt": [], "output": []}
    for output, wanted in zip(outputs, truth, strict=True):
        prompt = _prompt_scores(output)
        for part, got, want in (
            ("prompt", prompt, wanted[: len(prompt)]),
            ("output", scores(output.outputs[0]), wanted[len(prompt) :]),
        ):
            parts[part] += np.abs(np.subtract(got, want)).tolist()
    values = {f"{part} mean": float(np.mean(found)) for part, found in parts.items()}
    worst = {f"{part} worst": float(np.max(found)) for part, found in parts.items()}
    right = all(mean <= allowed for mean in values.values())  # NaN is not
    return Row(case, values | worst, outcome="ok" if right else FAILED)


def _alone(case: str, llm: Any, prompts: Sequence[str], params: Any, exact: bool) -> Row:
    """Compares answers of each prompt alone with those of all together. exact: bits must be equal."""
    alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    together = [output.outputs[0] for output in llm.generate(list(prompts), params, use_tqdm=False)]
    both = list(zip(alone, together, strict=True))
    texts = sum(a.token_ids == b.token_ids for a, b in both)
    bits = sum(a.token_ids == b.token_ids and scores(a) == scores(b) for a, b in both)
    values = {"equal texts": f"{texts}/{len(both)}", "equal bits": f"{bits}/{len(both)}"}
    return Row(case, values, outcome="ok" if bits == len(both) or not exact else FAILED)


def scores(completion: Any) -> list[float]:
    """Log probabilities of a completion's tokens."""
    return [float(at[i].logprob) for at, i in zip(completion.logprobs, completion.token_ids, strict=True)]


def _prompt_scores(output: Any) -> list[float]:
    """Log probabilities of a prompt's tokens; 0 for the first, which has none."""
    rest = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return [0.0, *(float(at[i].logprob) for at, i in rest)]


def computed_on_cpu(module: str, order: Any) -> Any:
    """Writes the order to a JSON file, which `python -m MODULE FILE` replaces by its results, on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "order.json"
        file.write_text(json.dumps(order))
        subprocess.run(
            [sys.executable, "-m", module, str(file)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return json.loads(file.read_text())


def _score(file: Path) -> None:
    """Replaces the file's texts by their log probabilities."""
    from jengine import LLM, SamplingParams

    assert jax.default_backend() == "cpu"
    prompts = [{"prompt_token_ids": text} for text in json.loads(file.read_text())]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with LLM("demo", dtype="float32", **LIMITS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    file.write_text(json.dumps([_prompt_scores(output) for output in outputs]))


if __name__ == "__main__":
    _score(Path(sys.argv[1]))
