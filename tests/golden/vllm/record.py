"""Records what vLLM answers to the cases, beside this script.

Run from the repository's root, in a Python with vLLM for CPUs (`make goldens-vllm` makes one): python -m
tests.golden.vllm.record
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import vllm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from tests.golden.vllm.cases import (
    ANSWERS,
    BEAM_ANSWERS,
    BEAMS,
    CASES,
    DEFAULTS,
    MAX_MODEL_LEN,
    MODELS,
    REFUSED,
    write_case_model,
)


def sampling_params(changes: dict[str, Any]) -> SamplingParams:
    fields = {**DEFAULTS, **changes}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    return SamplingParams(**fields)


def entries(positions: Sequence[Mapping[int, Any] | None] | None) -> list[Any] | None:
    """[token, log probability, rank, text] in vLLM's order, for each position."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else [
            [token, round(value.logprob, 6), value.rank, value.decoded_token]
            for token, value in position.items()
        ]
        for position in positions
    ]


def answer(llm: LLM, prompt: str | list[int], params: dict[str, Any]) -> dict[str, Any]:
    given = prompt if isinstance(prompt, str) else TokensPrompt(prompt_token_ids=prompt)
    output = llm.generate(given, sampling_params(params), use_tqdm=False)[0]
    completion = output.outputs[0]
    return {
        "prompt_token_ids": list(output.prompt_token_ids or []),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cumulative_logprob": completion.cumulative_logprob,
        "logprobs": entries(completion.logprobs),
        "prompt_logprobs": entries(output.prompt_logprobs),
    }


def beams(llm: LLM, prompt: str | list[int], params: dict[str, Any]) -> list[dict[str, Any]]:
    given = {"prompt": prompt} if isinstance(prompt, str) else TokensPrompt(prompt_token_ids=prompt)
    [output] = llm.beam_search([given], BeamSearchParams(**params))
    found = [
        {"tokens": list(beam.tokens), "text": beam.text, "cum_logprob": beam.cum_logprob}
        for beam in output.sequences
    ]
    found[0]["logprobs"] = entries(output.sequences[0].logprobs)
    return found


def refusal(llm: LLM, params: dict[str, Any]) -> str | None:
    """The kind of error; None where there is an answer."""
    try:
        answer(llm, "n", params)
    except Exception as error:  # vLLM has kinds of its own, not all of them ValueErrors
        return type(error).__name__
    return None


def record(name: str) -> tuple[dict[str, Any], dict[str, str | None], dict[str, Any]]:
    """A model's answers, rejections and beams, from a separate process, since vLLM supports one model per
    process.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_case_model(Path(folder), name)
        llm = LLM(
            folder,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=True,
            enable_prefix_caching=False,
            structured_outputs_config={"backend": "guidance"},
        )
    answers = {
        key: answer(llm, case.prompt, case.params) for key, case in CASES.items() if case.model == name
    }
    found = {key: beams(llm, case.prompt, case.params) for key, case in BEAMS.items() if case.model == name}
    return answers, {key: refusal(llm, params) for key, params in REFUSED.items()}, found


def main() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        recorded = list(pool.map(record, MODELS))
    answers = {key: value for some, _, _ in recorded for key, value in some.items()}
    lines = [f"{json.dumps(key)}: {json.dumps(answers[key])}" for key in CASES]
    head = (
        f'"vllm": {json.dumps(vllm.__version__)},\n"refused": {json.dumps(recorded[0][1])},\n"answers": {{\n'
    )
    ANSWERS.write_text("{\n" + head + ",\n".join(lines) + "\n}\n}\n")
    found = {key: value for _, _, some in recorded for key, value in some.items()}
    lines = [f"{json.dumps(key)}: {json.dumps(found[key])}" for key in BEAMS]
    BEAM_ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(answers)} answers, {ANSWERS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
