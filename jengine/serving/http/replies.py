"""Members that answers of OpenAI's API share, with the fields that vLLM adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jengine import Logprob, RequestOutput
from jengine.serving.calls.portions import Portioned, width_of
from jengine.serving.http.parts import Parts, long_array

Usage = dict[str, Any]


def usage(output: RequestOutput, completion_tokens: int) -> Usage:
    return _usage(len(output.prompt_token_ids), completion_tokens, output.num_cached_tokens or 0)


def usage_sum(parts: list[Usage]) -> Usage:
    """The sum over several prompts."""
    return _usage(
        sum(part["prompt_tokens"] for part in parts),
        sum(part["completion_tokens"] for part in parts),
        sum(part["prompt_tokens_details"]["cached_tokens"] for part in parts),
    )


def _usage(prompt: int, completion: int, cached: int) -> Usage:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def prompt_logprobs(portioned: Portioned, positions: Sequence[dict[int, Logprob] | None]) -> Parts:
    """Log probabilities of the prompt in vLLM's format."""

    def shown(positions: Sequence[dict[int, Logprob] | None]) -> list[Any]:
        return [
            None
            if position is None
            else {
                token: {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
                for token, entry in position.items()
            }
            for position in positions
        ]

    return await long_array(portioned, positions, width_of(positions), shown)
