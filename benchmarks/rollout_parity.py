"""How far log probabilities of a trainer are from those of the engine that generated the rollouts.

    python -m benchmarks.rollout_parity [--prompts 32] [--tokens 64]

Both run one definition of the model: the trainer jengine.Forward, the engine its programs with a paged cache.
Prompts of several lengths are sampled together; the trainer computes whole sequences at once. The engine
computes the same tokens once more: as completions (`score_tokens`), and as prompts (`prompt_logprobs`).
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import save
from jengine import LLM, Forward, RequestOutput, SamplingParams

WORDS = ("def", "class", "import", "return", "for", "value", "in", "self.items", "if", "not", "None", "else")


def prompts(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, 1 + at % 12)) for at in range(count)]


def rollouts(llm: LLM, count: int, tokens: int) -> list[RequestOutput]:
    params = [SamplingParams(max_tokens=tokens, seed=at, logprobs=0, ignore_eos=True) for at in range(count)]
    return llm.generate(prompts(count), params, use_tqdm=False)


def sampled(outputs: list[RequestOutput]) -> np.ndarray:
    """float32 [rollouts, tokens], as the engine reported them while it sampled."""
    each = [(output.outputs[0].token_ids, output.outputs[0].logprobs or []) for output in outputs]
    return np.array(
        [[entry[token].logprob for token, entry in zip(*one, strict=True)] for one in each], np.float32
    )


def scored(llm: LLM, outputs: list[RequestOutput]) -> np.ndarray:
    """The same, of given completions."""
    each = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    return np.array(llm.score_tokens(*zip(*each, strict=True)), np.float32)


def as_prompts(llm: LLM, outputs: list[RequestOutput]) -> np.ndarray:
    """The same, as parts of prompts."""
    rows = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for output, row in zip(llm.generate(rows, params, use_tqdm=False), rows, strict=True):
        start = len(row) - len(outputs[len(found)].outputs[0].token_ids)
        entries = (output.prompt_logprobs or [])[start:]
        found.append(
            [entry[token].logprob for token, entry in zip(row[start:], entries, strict=True) if entry]
        )
    return np.array(found, np.float32)


def trained(
    forward: Forward, params: dict[str, jax.Array], outputs: list[RequestOutput], length: int
) -> np.ndarray:
    """Log probabilities by the trainer, all rollouts at once."""
    tokens = np.zeros((len(outputs), length), np.int32)
    for row, output in zip(tokens, outputs, strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        row[: len(ids)] = ids
    logprobs = np.asarray(jax.jit(forward.logprobs)(params, jnp.asarray(tokens)))
    spans = [(len(output.prompt_token_ids) - 1, len(output.outputs[0].token_ids)) for output in outputs]
    return np.stack([row[start : start + count] for row, (start, count) in zip(logprobs, spans, strict=True)])


def differences(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    apart = np.abs(one.astype(np.float64) - other)
    return {"largest": float(apart.max()), "mean": float(apart.mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    length, results = 32 + args.tokens, {}
    for dtype in ("float32", "bfloat16"):
        forward = Forward("demo", dtype=dtype, max_model_len=length)
        params = forward.load(dtype)
        for invariant in (False, True):
            options: dict[str, Any] = {
                "max_num_seqs": args.prompts,
                "max_model_len": length,
                "progress": False,
            }
            with LLM("demo", params=params, dtype=dtype, batch_invariant=invariant, **options) as llm:
                outputs = rollouts(llm, args.prompts, args.tokens)
                engine, completions, whole = sampled(outputs), scored(llm, outputs), as_prompts(llm, outputs)
            name = f"{dtype}, batch_invariant" if invariant else dtype
            results[name] = {
                "trainer": differences(engine, trained(forward, params, outputs, length)),
                "scored as completions": differences(engine, completions),
                "scored as prompts": differences(engine, whole),
                "tokens": engine.size,
            }
            print(name, results[name], flush=True)
    save("rollout_parity", {"model": "demo", "log_probabilities": results})


if __name__ == "__main__":
    main()
