"""/v1/score and /v1/rerank."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
from openai.types import CompletionUsage

from jengine import InvalidArgument, SamplingParams, TokensPrompt, scoring_of
from jengine.serving.guards.admission import client_of
from jengine.serving.http import replies
from jengine.serving.http.bodies import RERANK, SCORE, Body, BodyFields
from jengine.serving.http.calls import HttpCall, id_headers
from jengine.serving.http.completion_service import MOST_PROMPTS
from jengine.serving.http.service import HttpService, level_of
from jengine.serving.requests.service import ParsedRequest, Shared

SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))  # names of the texts to score


class Asked(NamedTuple):
    """The texts of a request.

    Attributes:
        names: the request's names for queries and documents.
    """

    queries: str | list[str]
    documents: str | list[str]
    names: tuple[str, str]


class Scored(NamedTuple):
    """A request with its scores, in the order of its documents."""

    request_id: str
    model: str
    body: Body
    asked: Asked
    scores: list[float]
    usage: CompletionUsage


class ScoringPath(NamedTuple):
    """What differs between the paths.

    Attributes:
        read: raises InvalidArgument.
        reply: an object for JSON.
    """

    path: str
    form: BodyFields
    read: Callable[[Body], Asked]
    reply: Callable[[Scored], dict[str, Any]]


class ScoringService(HttpService):
    """Scores pairs of texts with an embedding model or a reranker."""

    def __init__(self, shared: Shared, most_bytes: int, kind: ScoringPath) -> None:
        super().__init__(shared, most_bytes)
        self.PATH, self._kind = kind.path, kind

    async def _create(self, call: HttpCall, given: dict[str, Any], size: int, request_id: str) -> None:
        with self._tracker.track(f"POST {self.PATH}", request_id, call) as first:
            self._admission.stream(call)
            body, model = await self._read(self._kind.form, given, call, first)
            asked = self._kind.read(body)
            llm, names = model.llm, dict(zip(("queries", "documents"), asked.names, strict=True))
            call.names = names
            scoring = scoring_of(
                asked.queries, asked.documents, body.get("instruction"), llm.backend.limits, llm.tokenizer
            )
            if not scoring.embeds:
                self._check_prompts(asked, len(scoring.pairs), body.get("instruction", ""))
            judged: dict[int, TokensPrompt] = {}  # of the last position

            async def parsed(index: int) -> ParsedRequest:
                task = scoring.tasks[index]
                listed = isinstance(getattr(asked, task.side), list)
                name = f"{names[task.side]}[{task.position}]" if listed else names[task.side]
                call.names = names | dict.fromkeys(("prompt", "prompt_token_ids"), name)
                prompt = task.prompt
                if (judgement := task.judgement) is not None:
                    if task.position not in judged:  # several tasks have the same prompt
                        judged.clear()
                        judged[task.position] = await self._judged(model, judgement, call)
                    prompt = partial(judged.__getitem__, task.position)
                return ParsedRequest(
                    task.params or SamplingParams(),
                    prompt,
                    size,
                    embedding={} if scoring.embeds else None,
                    **level_of(body),
                )

            prompts = [partial(parsed, index) for index in range(len(scoring.tasks))]
            outputs = await self._outputs(call, model, first, prompts, asked.names[1])
            # Thousands of long vectors take tens of milliseconds to compare.
            work = sum(0 if output.embedding is None else output.embedding.nbytes for output in outputs)
            scores = await self._text_work.run(client_of(call), work, partial(scoring.scores, outputs))
            usage = replies.usage_sum([replies.usage(output, 0) for output in scoring.prompts(outputs)])
            reply = self._kind.reply(Scored(first.request_id, model.name, body, asked, scores, usage))
        await call.answer(200, msgspec.json.encode(reply), id_headers(first.request_id))

    def _check_prompts(self, asked: Asked, pairs: int, instruction: str) -> None:
        """A reranker's prompts repeat the query. In all, they may have as many characters as a body has
        bytes.
        """
        queries = [asked.queries] if isinstance(asked.queries, str) else asked.queries
        size = (
            sum(map(len, queries)) * pairs // len(queries)
            + sum(map(len, asked.documents))
            + len(instruction) * pairs
        )
        if size > self._most_bytes:
            limit = (
                f"at most {self._most_bytes} (max_message_bytes); each of the {pairs} prompts has its query"
            )
            raise InvalidArgument(asked.names[0], f"{size} characters in all prompts", limit)


def _check_count(name: str, texts: str | list[Any]) -> None:
    if isinstance(texts, list) and len(texts) > MOST_PROMPTS:
        raise InvalidArgument(name, f"{len(texts)} texts", f"at most {MOST_PROMPTS}")


def _pairs(body: Body) -> Asked:
    """The texts to score, under one of the names that vLLM has given them."""
    given = [names for names in SIDES if body.fields.keys() & set(names)]
    if len(given) > 1:
        raise InvalidArgument(
            given[1][0], body.get(given[1][0]), f"{given[0][0]} and {given[0][1]} are given too"
        )
    names = given[0] if given else SIDES[0]
    for name in names:
        if name not in body.fields:
            raise InvalidArgument(name, None, "must be given")
        _check_count(name, body.get(name))
    return Asked(body.get(names[0]), body.get(names[1]), names)


def _scores(scored: Scored) -> dict[str, Any]:
    return {
        "id": f"score-{scored.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": scored.model,
        "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scored.scores)],
        "usage": _used(scored.usage),
    }


def _ranking(body: Body) -> Asked:
    """A query, and the documents to rank."""
    for name in ("query", "documents"):
        if name not in body.fields:
            raise InvalidArgument(name, None, "must be given")
    documents, top = body.get("documents"), body.get("top_n", 0)
    _check_count("documents", documents)
    if top < 0:
        raise InvalidArgument("top_n", top, "must be at least 1; 0 returns all documents")
    texts = [document if isinstance(document, str) else document["text"] for document in documents]
    return Asked(body.get("query"), texts, ("query", "documents"))


def _ranked(scored: Scored) -> dict[str, Any]:
    """The best documents first; equal ones in the order of the request."""
    order = sorted(range(len(scored.scores)), key=lambda i: -scored.scores[i])
    results: list[dict[str, Any]] = []
    for i in order[: scored.body.get("top_n") or None]:
        shown = (
            {"document": {"text": scored.asked.documents[i]}}
            if scored.body.get("return_documents", True)
            else {}
        )
        results.append({"index": i, **shown, "relevance_score": scored.scores[i]})
    return {
        "id": f"rerank-{scored.request_id}",
        "object": "list",
        "model": scored.model,
        "results": results,
        "usage": _used(scored.usage),
    }


def _used(usage: CompletionUsage) -> dict[str, Any]:
    return usage.model_dump(exclude_none=True)


SCORES = ScoringPath("/v1/score", SCORE, _pairs, _scores)
RANKS = ScoringPath("/v1/rerank", RERANK, _ranking, _ranked)
