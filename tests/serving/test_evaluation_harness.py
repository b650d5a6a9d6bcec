"""EleutherAI's lm_eval asks a server for log probabilities, as `local-completions`; skipped where the package
is missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import jengine
from jengine import LLM, SamplingParams
from tests.serving.processes import process

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
metadata: {{version: 1}}
"""
QUESTIONS = [
    ("def add(a, b):\n    return a", [" + b", " import", "\n\nclass"]),
    ("import numpy as", [" np", " pd", " 17"]),
    ("for i in", [" range(10):", " while", " ]"]),
    ("class Stack:\n    def __init__(", ["self", "cls)", "yield"]),
    ("if __name__ ==", [' "__main__":', " None", " 3.5"]),
    ("try:\n    x = 1\n", ["except", "finally:", "def"]),
    ("with open(path) as", [" file:", " f:", " 12"]),
    ("été = ", ["1", "'", "\n"]),
]


@pytest.mark.full
def test_log_probabilities_are_the_librarys(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    llm = LLM("demo", progress=False, dtype="float32")
    lines = [
        json.dumps({"question": question, "choices": choices, "answer": 0}) for question, choices in QUESTIONS
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    (tmp_path / "python.yaml").write_text(TASK.format(name="python", file=tmp_path / "questions.jsonl"))
    with process(
        [sys.executable, "-m", "jengine.cli", "serve", "demo", "--dtype=float32", "--grpc-port=0", "--port=0"]
    ) as server:
        server.wait_until_ready()
        tokenizer = Path(jengine.__file__).parent / "demo"
        arguments = (
            f"model=demo,base_url={server.http}/completions,"
            f"tokenizer_backend=huggingface,tokenizer={tokenizer},num_concurrent=4"
        )
        command = [
            "--model=local-completions",
            f"--model_args={arguments}",
            "--tasks=python",
            f"--include_path={tmp_path}",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "lm_eval", *command, f"--output_path={tmp_path}/out", "--log_samples"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").glob("**/samples_python_*.jsonl")
    got = sorted(
        (json.loads(line) for line in samples.read_text().splitlines()), key=lambda sample: sample["doc_id"]
    )
    assert len(got) == len(QUESTIONS)
    for (question, choices), sample in zip(QUESTIONS, got, strict=True):
        told = [float(answer[0][0]) for answer in sample["resps"]]
        assert told == pytest.approx([score(llm, question, choice) for choice in choices], abs=1e-4)


def score(llm: LLM, context: str, continuation: str) -> float:
    """The log probability of a continuation. As in lm_eval, it begins with the space at its context's end."""
    whole, before = (
        llm.tokenizer.encode(text, add_special_tokens=False)
        for text in (context + continuation, context.rstrip())
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": whole}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    tokens = list(zip(whole, output.prompt_logprobs, strict=True))[len(before) :]
    return sum(position[token].logprob for token, position in tokens if position is not None)
