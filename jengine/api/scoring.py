"""Scores of pairs of texts: what the engine is asked, and how its outputs become scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from jengine.api.embeddings import ScoringOutput, ScoringRequestOutput
from jengine.api.prompts import TokensPrompt, check_length
from jengine.base.errors import InvalidArgument, ModelError, PromptTooLong
from jengine.base.options import check_whole
from jengine.core.pooling import Reranker, Similarity
from jengine.core.request import Request, RequestOutput, SamplingParams
from jengine.engine.limits import Limits
from jengine.text.tokenizer import Tokenizer

Pair = tuple[str, str]  # a query and a document
Side = Literal["queries", "documents"]


class ScoringTask(NamedTuple):
    """A request to the engine.

    Attributes:
        prompt: makes the prompt, in any thread; raises InvalidArgument or ModelError.
        params: None for an embedding.
        side, position: the text that the prompt holds; a pair's document if it holds both.
        judgement: what the prompt is rendered from; None: it is not.
    """

    prompt: Callable[[], str | TokensPrompt]
    params: SamplingParams | None
    side: Side
    position: int
    judgement: Judgement | None = None


class Judgement(NamedTuple):
    """A reranker's question: the arguments of `judging_text`."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    max_model_len: int
    max_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The requests that score pairs of texts.

    Attributes:
        tasks: the requests.
        pairs: for each pair of texts, the indices of the two tasks that its score compares, which may be
            the same.
        score: the score, from the outputs of these two tasks. Both have finished.
        embeds: whether the tasks are embeddings of different texts.
        per_prompt: this many successive tasks have the same prompt.
    """

    tasks: Sequence[ScoringTask]
    pairs: Sequence[tuple[int, int]]
    score: Callable[[RequestOutput, RequestOutput], float]
    embeds: bool
    per_prompt: int = 1

    def scores(self, outputs: Sequence[RequestOutput]) -> list[float]:
        """The score of each pair, from the outputs of all tasks."""
        return [self.score(outputs[first], outputs[second]) for first, second in self.pairs]

    def prompts(self, outputs: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
        """One of the outputs for each prompt that was computed."""
        return outputs[:: self.per_prompt]

    def results(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        """The results of LLM.score.

        Raises:
            JengineError: a request ended before its end.
        """
        for output in outputs:
            output.require_answer("a score")
        return [
            _result(self.prompts([outputs[i] for i in dict.fromkeys(pair)]), score)
            for pair, score in zip(self.pairs, self.scores(outputs), strict=True)
        ]


def scoring_of(
    queries: str | Sequence[str],
    documents: str | Sequence[str],
    instruction: str | None,
    limits: Limits,
    tokenizer: Tokenizer,
) -> Scoring:
    """How the model scores these pairs.

    Args:
        queries, documents, instruction: as for LLM.score.

    Raises:
        InvalidArgument: the numbers of texts differ, an item is not text, or the model cannot score.
    """
    left, right = _texts("queries", queries), _texts("documents", documents)
    if len(left) not in (1, len(right)):
        raise InvalidArgument(
            "queries", f"{len(left)} queries", f"must be one, or as many as documents ({len(right)})"
        )
    pairs = [*zip(left * len(right) if len(left) == 1 else left, right, strict=True)]
    if limits.reranker is not None:
        return _by_judgement(pairs, limits, limits.reranker, tokenizer, instruction)
    if limits.embedder is None:
        limit = (
            "this model cannot score: that takes an embedding model (embeddings=True when the engine starts),"
            " or a reranker whose modules.json has a LogitScore; cross-encoders are not supported"
        )
        raise InvalidArgument("embeddings", False, limit)
    if instruction is not None:
        raise InvalidArgument(
            "instruction", instruction, "is for rerankers; add it to the queries of an embedding model"
        )
    return _by_similarity(pairs, limits.embedder.similarity)


def _by_similarity(pairs: Sequence[Pair], similarity: Similarity) -> Scoring:
    """Compares the texts' embeddings. Each different text is embedded once."""
    places: dict[str, int] = {}
    tasks: list[ScoringTask] = []
    sides: tuple[Side, Side] = ("queries", "documents")
    for index, pair in enumerate(pairs):
        for side, text in zip(sides, pair, strict=True):
            if text not in places:
                places[text] = len(tasks)
                tasks.append(ScoringTask(partial(str, text), None, side, index))
    return Scoring(
        tasks=tasks,
        pairs=[(places[query], places[document]) for query, document in pairs],
        score=partial(_similarity, SIMILARITIES[similarity]),
        embeds=True,
    )


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of the angle between two vectors."""
    cosine = float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)
    return min(max(cosine, -1.0), 1.0)  # rounding


SIMILARITIES: dict[Similarity, Callable[[np.ndarray, np.ndarray], float]] = {
    "cosine": _cosine,
    "dot": lambda a, b: float(a @ b),
    "euclidean": lambda a, b: -float(np.linalg.norm(a - b)),
    "manhattan": lambda a, b: -float(np.abs(a - b).sum()),
}


def _similarity(
    compare: Callable[[np.ndarray, np.ndarray], float], query: RequestOutput, document: RequestOutput
) -> float:
    assert query.embedding is not None and document.embedding is not None
    return compare(query.embedding.astype(np.float64), document.embedding.astype(np.float64))


def _by_judgement(
    pairs: Sequence[Pair], limits: Limits, reranker: Reranker, tokenizer: Tokenizer, instruction: str | None
) -> Scoring:
    """Compares the probabilities of the reranker's two tokens, as the next token.

    If log probabilities are those of the raw logits, each pair has a prompt and two requests, one for each
    token. If they are those of the distribution from which tokens are drawn, a request that allows both
    tokens has all that matters.
    """
    tokens = reranker.true_token_id, reranker.false_token_id
    choices = [[*tokens]] if reranker.processed_logprobs else [[token] for token in tokens]
    each = [
        SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=choice,
            logprobs=len(choice) if reranker.processed_logprobs else 0,
            detokenize=False,
        )
        for choice in choices
    ]
    tasks = []
    for index, pair in enumerate(pairs):
        judgement = _question(pair, reranker, instruction, limits.sequence.max_model_len)
        prompt = cache(partial(_judging_prompt, tokenizer, judgement))
        tasks += [ScoringTask(prompt, params, "documents", index, judgement) for params in each]
    count = len(each)
    return Scoring(
        tasks=tasks,
        pairs=[(i, i + count - 1) for i in range(0, len(tasks), count)],
        score=partial(_judgement, reranker),
        embeds=False,
        per_prompt=count,
    )


def _question(pair: Pair, reranker: Reranker, instruction: str | None, max_model_len: int) -> Judgement:
    """Asks whether the document fits the query."""
    rule = reranker.instruction if instruction is None else instruction
    rules = [] if rule is None else [{"role": "system", "content": rule}]
    messages = [*rules, {"role": "query", "content": pair[0]}, {"role": "document", "content": pair[1]}]
    return Judgement(messages, reranker.add_generation_prompt, max_model_len, reranker.max_tokens)


def _judging_prompt(tokenizer: Tokenizer, judgement: Judgement) -> TokensPrompt:
    return {"prompt_token_ids": judging_text(tokenizer, **judgement._asdict())[1]}


def judging_text(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    max_model_len: int,
    max_tokens: int | None,
) -> tuple[str, list[int]]:
    """The text and the tokens of a reranker's prompt. Runs the chat template.

    Raises:
        InvalidArgument: a text is too long, or the template rejects it.
        ModelError: the model has no chat template.
    """
    template = tokenizer.chat_templates.get("default")
    if template is None:
        raise ModelError(
            "the reranker has no chat template, which is needed to build its prompts", file=tokenizer.folder
        )
    text = template.render(messages, add_generation_prompt=add_generation_prompt)
    check_length(tokenizer, text, max_model_len)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if max_tokens is not None and len(ids) > max_tokens:
        limit = f"{len(ids)} tokens; at most {max_tokens}, the model's max_seq_length or model_max_length"
        raise PromptTooLong("prompt_token_ids", f"{len(ids)} tokens", limit, len(ids), max_tokens)
    return text, ids


def _judgement(reranker: Reranker, true: RequestOutput, false: RequestOutput) -> float:
    """The probability of the true token against the false one, or the logarithm of their odds."""
    margin = _logprob(true, reranker.true_token_id) - _logprob(false, reranker.false_token_id)
    if not reranker.probability:
        return margin
    return 1.0 / (1.0 + math.exp(-margin)) if margin > -700.0 else 0.0


def _logprob(output: RequestOutput, token: int) -> float:
    """Log probability of an allowed token."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return completion.logprobs[0][token].logprob


def _result(computed: Sequence[RequestOutput], score: float) -> ScoringRequestOutput:
    """The result of a pair, whose prompts are these."""
    return ScoringRequestOutput(
        request_id="_".join(output.request_id for output in computed),
        outputs=ScoringOutput(score=score),
        prompt_token_ids=[token for output in computed for token in output.prompt_token_ids],
        num_cached_tokens=sum(output.num_cached_tokens or 0 for output in computed),
    )


def _texts(name: str, value: str | Sequence[str]) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(name, value, "must be a text, or a list of at least one")
    return texts


TokenIds = Sequence[int]
TokenLists = Sequence[TokenIds]


def given_requests(
    prompts: TokenLists,
    completions: TokenLists,
    limits: Limits,
    mode: str,
    make: Callable[[list[int], SamplingParams], list[Request]],
) -> list[list[Request]]:
    """The requests of score_tokens.

    Args:
        mode: the engine's logprobs_mode.
        make: creates and validates a prompt's requests.

    Raises:
        InvalidArgument: see there.
    """
    from jengine.text.masks import GivenTokens  # imports llguidance, which a start does not need

    if len(prompts) != len(completions):
        raise InvalidArgument("completions", f"{len(completions)} completions", f"must be {len(prompts)}")
    if mode != "raw_logprobs":
        limit = "must be raw_logprobs to score: with it, a token that is given has probability 1"
        raise InvalidArgument("logprobs_mode", mode, limit)
    work, longest = [], limits.sequence.max_model_len
    for prompt, completion in zip(prompts, completions, strict=True):
        if not len(completion):
            raise InvalidArgument("completions", completion, "each must have at least one token")
        for token in completion:
            check_whole("completions", token, 0, limits.vocab_size - 1)
        if len(prompt) + len(completion) > longest:
            limit = f"at most max_model_len = {longest} with their prompts"
            raise InvalidArgument("completions", f"{len(completion)} tokens", limit)
        count = len(completion)
        params = SamplingParams(
            temperature=0.0, logprobs=0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        [request] = make([*prompt], params)
        request.mask = GivenTokens([*completion])
        work.append([request])
    return work


def logprobs_of(completion: TokenIds, output: RequestOutput) -> list[float]:
    """Each token's log probability.

    Raises:
        JengineError: the request was aborted.
    """
    output.require_answer("log probabilities")
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [entry[token].logprob for token, entry in zip(completion, logprobs, strict=True)]
