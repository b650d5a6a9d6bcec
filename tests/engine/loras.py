"""Helpers for tests with LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save

from jengine.core.lora import LoraInfo
from jengine.core.request import SamplingParams
from jengine.core.updates import PromptScores
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import LoadLora
from tests.engine.running import Answer, requests_of
from tests.golden.loras import Lora

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
EXPERTS = {"lora_target_modules": ["self_attn", "experts"]}
VOCABULARY = {"lora_target_modules": "q_proj,embed_tokens,lm_head"}
# options with which an engine takes the adapters of golden.loras for a variant
TARGETS: dict[str, dict[str, Any]] = {
    **{"qwen3_moe": EXPERTS, "mixtral": EXPERTS},
    "qwen3_next": {"lora_target_modules": ["self_attn", "linear_attn", "shared_expert_gate", "experts"]},
    **{"qwen3_untied": VOCABULARY, "qwen2_tied": VOCABULARY},
}
Work = tuple[list[int], SamplingParams, str | None]  # a prompt, and the name of its adapter


def load(engine: Engine, name: str, adapter: Lora, **how: Any) -> LoraInfo:
    """Loads an adapter from memory. how: load_inplace, keep."""
    operation = LoadLora(name, config=adapter.config, tensors=save(adapter.tensors), **how)
    operation.check(engine.limits)
    return engine.do(operation)


def add(engine: Engine, number: int, work: Work) -> list[Answer]:
    """Queues a prompt."""
    prompt, params, name = work
    requests = requests_of(str(number), prompt, params)
    for request in requests:
        request.lora_name = name
    engine.limits.validate(requests[0])
    return [Answer(sequence) for sequence in engine.add(*requests)]


def run_adapted(
    engine: Engine, work: Sequence[Work], each_step: Callable[[], object] = lambda: None
) -> list[Answer]:
    """Runs requests together. Returns the answers in order, those of a prompt one after the other."""
    answers = [answer for i, one in enumerate(work) for answer in add(engine, i, one)]
    by_id = {answer.sequence.request_id: answer for answer in answers}
    while engine.has_work:
        for update in engine.step():
            answer = by_id[update.request_id]
            if isinstance(update, PromptScores):
                answer.scores.append(update)
            else:
                answer.updates.append(update)  # type: ignore[arg-type]
        engine.scheduler.check_integrity()
        each_step()
    assert engine.scheduler.blocks.owned == 0
    return answers


def prompts(count: int, length: int, vocab: int = 96) -> list[list[int]]:
    """Different prompts."""
    draw = np.random.default_rng(length)
    return [draw.integers(1, vocab, length).tolist() for _ in range(count)]


def results(answer: Answer) -> list[tuple[int, float]]:
    """Tokens and their log probabilities, to the last bit."""
    return [(update.token, update.logprobs.chosen) for update in answer.updates]  # type: ignore[union-attr]
