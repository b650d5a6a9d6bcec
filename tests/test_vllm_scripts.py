"""Scripts as vLLM's users write them: only the import is another."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jengine.api.metrics import Counter, Gauge, Vector, get_metrics
from jengine.core.updates import Load
from jengine.insight.recording.records import StepTotals
from tests.engine.on_demand import on_demand
from tests.golden.loras import Lora, write_lora

SCRIPTS = Path(__file__).parent / "scripts"
PRINTED = {
    "offline": (
        "Prompt: 'def fibonacci(n):', tokens: 8, reason: length\nPrompt: 'import os\\\\n', tokens: \\d,"
        " reason: \\w+\nPrompt: 'class Stack:', tokens: \\d, reason: \\w+\nTokens: 4\n"
    ),
    "embed": "Prompt: 'def main():', size: 256, length: 1.000\nPrompt: 'The capital of France is', size: 256,"
    " length: 1.000\n",
    "multi_lora": (
        "Finished: ['0', '1', '2', '3']\nDifferent texts: 3 Completions: 2\nUnfinished: False []\n"
    ),
    "spec_decode": (
        "Running: 0 {'model_name': 'demo'}\nSteps: True True\nDrafts: True True\nBy position: True\n"
    ),
    "chat": "assistant:\nAnswers: 2 Prompt tokens: [True, True]\nDecoded: True True\n",
    "structured": "Choice: True\nRegex: v 4\nJSON: ['age']\nGrammar: SELECT 8\n",
    "logprobs": (
        "Prompt: None True Mean finite: True\nTokens: [True, True, True] True\nPrompt: None True Mean finite:"
        " True\nTokens: [True, True, True] True\nOne token: [None]\nEmbedding: True 1.0\nEmbedding: True"
        " 1.0\n"
    ),
    "streaming": "Streamed: True True\n",
}
IN_VLLM = {  # vLLM's modules and what scripts import from them
    "vllm": {
        "LLM", "SamplingParams", "TokensPrompt", "EngineArgs", "LLMEngine", "RequestOutput",
    },
    "vllm.engine.arg_utils": {"AsyncEngineArgs"},
    "vllm.inputs": {"TokensPrompt"},
    "vllm.lora.request": {"LoRARequest"},
    "vllm.outputs": {"RequestOutput"},
    "vllm.sampling_params": {"StructuredOutputsParams", "RequestOutputKind"},
    "vllm.utils": {"FlexibleArgumentParser", "random_uuid"},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser"},
    "vllm.v1.engine.async_llm": {"AsyncLLM"},
    "vllm.v1.metrics.reader": {"Counter", "Gauge", "Histogram", "Vector"},
}  # fmt: skip


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of two adapters of the demo model, which change its answers."""
    folders = []
    for number in range(2):
        random, tensors = np.random.default_rng(number), {}
        for layer in range(4):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
            tensors[f"{name}A.weight"] = random.normal(0.0, 0.5, (8, 256)).astype(np.float32)
            tensors[f"{name}B.weight"] = random.normal(0.0, 0.5, (256, 8)).astype(np.float32)
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
        folders.append(str(write_lora(tmp_path_factory.mktemp("adapter"), Lora(config, tensors))))
    return folders


def test_a_script_of_vllm_runs() -> None:
    """In a separate process, with a start as users have it."""
    command = [sys.executable, "-W", "error::UserWarning", str(SCRIPTS / "offline.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTED["offline"].replace("(n)", r"\(n\)"), done.stdout), done.stdout


@pytest.mark.parametrize("name", [name for name in PRINTED if name != "offline"])
def test_scripts_print_what_they_should(
    name: str, adapters: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, one after the other: most of their programs are the same."""
    file = str(SCRIPTS / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [file, *(adapters if name == "multi_lora" else [])])
    with on_demand():
        runpy.run_path(file, run_name="__main__")
    assert capsys.readouterr().out == PRINTED[name]


def test_only_the_import_differs() -> None:
    """No script imports a module or a name of jengine that vLLM would not have under its own."""
    found = {file.stem: file for file in SCRIPTS.glob("*.py")}
    assert found.keys() == PRINTED.keys()
    for file in found.values():
        tree = ast.parse(file.read_text())
        imports = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jengine")
        ]
        assert imports
        for node in imports:
            assert {alias.name for alias in node.names} <= IN_VLLM[
                str(node.module).replace("jengine", "vllm")
            ]
        assert "import jengine" not in file.read_text()


def test_drafts_in_the_metrics() -> None:
    """Accepted tokens by position, up to the longest draft of which any was accepted."""
    load = Load(0, 0, 7, 8, 0, 0, drafts=3, draft_tokens=9, accepted_tokens=(3, 1, 0))
    llm: Any = SimpleNamespace(engine=SimpleNamespace(load=load, totals=StepTotals), model="m")
    metrics = {metric.name: metric for metric in get_metrics(llm)}
    name, labels = "vllm:spec_decode_num_accepted_tokens", {"model_name": "m"}
    assert metrics[name] == Counter(name, labels, 4)
    assert metrics[f"{name}_per_pos"] == Vector(f"{name}_per_pos", labels, [3, 1])
    assert metrics["vllm:kv_cache_usage_perc"] == Gauge("vllm:kv_cache_usage_perc", labels, 0.125)
