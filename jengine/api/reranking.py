"""Scores of a language model that judges documents: the probability of "yes" against "no" as its next
token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jengine.api.embeddings import ScoringOutput, ScoringRequestOutput
from jengine.api.prompts import TokensPrompt, check_length
from jengine.base.errors import InvalidArgument, ModelError
from jengine.checkpoints.sentence_transformers import Reranker
from jengine.core.request import RequestOutput, SamplingParams
from jengine.text.tokenizer import Tokenizer

Pair = tuple[str, str]  # a query and a document


def paired(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[Pair]:
    """One query with each document, or as many queries as documents.

    Raises:
        InvalidArgument: the numbers differ, or an item is not text.
    """
    left, right = _texts("queries", queries), _texts("documents", documents)
    if len(left) not in (1, len(right)):
        raise InvalidArgument(
            "queries", f"{len(left)} queries", f"must be one, or as many as documents ({len(right)})"
        )
    return [*zip(left * len(right) if len(left) == 1 else left, right, strict=True)]


def judging_prompts(
    pairs: Iterable[Pair],
    reranker: Reranker,
    tokenizer: Tokenizer,
    instruction: str | None,
    max_model_len: int,
) -> list[tuple[TokensPrompt, SamplingParams]]:
    """Two requests for each pair with the same prompt: for the log probability of the true token, and of the
    false one.

    Raises:
        InvalidArgument: a text is too long, or the template rejects it.
        ModelError: the model has no chat template.
    """
    template = tokenizer.chat_templates.get("default")
    if template is None:
        raise ModelError(
            "the reranker has no chat template, which is needed to build its prompts", file=tokenizer.folder
        )
    instruction_text = reranker.instruction if instruction is None else instruction
    rules = [] if instruction_text is None else [{"role": "system", "content": instruction_text}]
    tokens = reranker.true_token_id, reranker.false_token_id
    each = [
        SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=[token], logprobs=0, detokenize=False)
        for token in tokens
    ]
    work: list[tuple[TokensPrompt, SamplingParams]] = []
    for query, document in pairs:
        messages = [*rules, {"role": "query", "content": query}, {"role": "document", "content": document}]
        text = template.render(messages, add_generation_prompt=reranker.add_generation_prompt)
        check_length(tokenizer, text, max_model_len)
        prompt: TokensPrompt = {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
        work += [(prompt, params) for params in each]
    return work


def judgement(true: RequestOutput, false: RequestOutput) -> ScoringRequestOutput:
    """The score of a pair, from its two requests."""
    margin = _logprob(true) - _logprob(false)
    return ScoringRequestOutput(
        request_id=true.request_id,
        outputs=ScoringOutput(score=1.0 / (1.0 + math.exp(-margin)) if margin > -700.0 else 0.0),
        prompt_token_ids=true.prompt_token_ids,
        num_cached_tokens=true.num_cached_tokens or 0,
    )


def _logprob(output: RequestOutput) -> float:
    """Log probability of the only allowed token."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return completion.logprobs[0][completion.token_ids[0]].logprob


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(name, given, "must be a text, or a list of at least one")
    return texts
