"""Scripts as vLLM's users write them: only the import is another."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import QUICK_PROCESS

SCRIPTS = Path(__file__).parent / "scripts"
PRINTED = {
    "offline": (
        "Prompt: 'def fibonacci(n):', tokens: 8, reason: length\nPrompt: 'import os\\\\n', tokens: \\d,"
        " reason: \\w+\nPrompt: 'class Stack:', tokens: \\d, reason: \\w+\nTokens: 4\n"
    ),
    "chat": "assistant:\nAnswers: 2 Prompt tokens: [True, True]\nDecoded: True True\n",
    "structured": "Choice: True\nRegex: v 4\nJSON: ['age']\n",
    "logprobs": (
        "Prompt: None True Mean finite: True\nTokens: [True, True, True] True\nPrompt: None True Mean finite:"
        " True\nTokens: [True, True, True] True\nOne token: [None]\nEmbedding: True 1.0\nEmbedding: True"
        " 1.0\n"
    ),
    "streaming": "Streamed: True True\n",
}
IN_VLLM = {  # vLLM's modules and what scripts import from them
    "vllm": {"LLM", "SamplingParams", "TokensPrompt", "AsyncEngineArgs", "AsyncLLMEngine"},
    "vllm.lora.request": {"LoRARequest"},
    "vllm.sampling_params": {"StructuredOutputsParams", "RequestOutputKind"},
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_script_of_vllm_runs(name: str) -> None:
    command = [sys.executable, "-W", "error::UserWarning", str(SCRIPTS / f"{name}.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **QUICK_PROCESS}, timeout=900
    )
    assert done.returncode == 0, done.stderr
    if name == "offline":
        assert re.fullmatch(PRINTED[name].replace("(n)", r"\(n\)"), done.stdout), done.stdout
    else:
        assert done.stdout == PRINTED[name]


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
