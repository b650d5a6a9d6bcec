"""jengine as a library, with bursts of decode steps, as its guide recommends for offline work. With quantized
weights, the rest is in bfloat16.

No drafts: with random weights, outputs soon repeat, and drafts would be right.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.worker import Limits
from jengine import LLM, SamplingParams
from jengine.core.request import Logprob


class Engine:
    def __init__(self, folder: Path, precision: str, limits: Limits) -> None:
        plain = precision in ("float32", "bfloat16")
        options = {"dtype": precision} if plain else {"dtype": "bfloat16", "quantization": precision}
        self.llm = LLM(
            folder,
            progress=False,
            max_num_seqs=limits.sequences,
            max_model_len=limits.tokens,
            cache_dir=limits.cache,
            enable_prefix_caching=False,
            speculative_config="none",
            **{"num_scheduler_steps": 8, **options, **limits.options},
        )

    def settle(self) -> None:
        self.llm.wait_until_compiled()

    def generate(
        self, prompts: list[list[int]], outputs: list[int], temperature: float = 0.0
    ) -> list[list[int]]:
        params = [
            SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True) for tokens in outputs
        ]
        return [
            list(answer.outputs[0].token_ids) for answer in self.llm.generate(prompts, params, use_tqdm=False)
        ]

    def gaps(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        """For each token of the greedy answers, its log probability minus the next best one's."""
        params = [
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2)
            for tokens in outputs
        ]
        answers = [answer.outputs[0] for answer in self.llm.generate(prompts, params, use_tqdm=False)]
        return [[lead(position) for position in answer.logprobs or []] for answer in answers]


def lead(position: dict[int, Logprob]) -> float:
    """The best log probability minus the next one."""
    first, second, *_ = sorted((entry.logprob for entry in position.values()), reverse=True)
    return first - second
