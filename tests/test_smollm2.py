"""A real model: SmolLM2-135M-Instruct from its GGUF file, against transformers."""

from __future__ import annotations

import json

import pytest
from smollm2 import smollm2

from jengine import LLM, SamplingParams
from tests.golden.smollm2 import ANSWERS, CHATS, NEW_TOKENS

pytestmark = pytest.mark.full
TABLE = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512, "progress": False}


def test_answers_are_those_of_transformers_at_float32() -> None:
    """From four bits in memory; prompts through the file's own tokenizer and template."""
    want = json.loads(ANSWERS.read_text())
    with LLM(str(smollm2()), dtype="float32", **TABLE) as llm:
        outputs = llm.chat(CHATS, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [answer["prompt"] for answer in want]
    assert [list(output.outputs[0].token_ids) for output in outputs] == [answer["answer"] for answer in want]
