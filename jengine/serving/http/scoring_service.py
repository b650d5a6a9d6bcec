"""/v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jengine import AsyncLLM, InvalidArgument, RequestOutput, SamplingParams, TokensPrompt
from jengine.serving.calls import portions
from jengine.serving.calls.portions import Parts, array, long_array, with_members
from jengine.serving.guards.admission import client_of
from jengine.serving.http import replies
from jengine.serving.http.bodies import EMBEDDING, RERANK, SCORE, Body, BodyFields
from jengine.serving.http.calls import HttpCall, id_headers
from jengine.serving.http.completion_service import MOST_PROMPTS, Prompt, listed
from jengine.serving.http.service import HttpService, level_of
from jengine.serving.requests.service import ParsedRequest, Shared, check_ids
from jengine.spi import scoring_of

SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))  # names of the texts to score


class EmbeddingService(HttpService):
    """Embeds texts and tokens."""

    PATH = "/v1/embeddings"

    async def _create(self, call: HttpCall, json_body: dict[str, Any], size: int, request_id: str) -> None:
        with self._tracker.track(f"POST {self.PATH}", request_id, call) as first:
            self._admission.stream(call)
            body, model = await self._read(EMBEDDING, json_body, call, first)
            call.names = {"prompt": "input"}
            llm, prompts = model.llm, listed("input", body.get("input"))
            for prompt in prompts:
                if isinstance(prompt, list):
                    check_ids("input", len(prompt), model)
            parsed = [partial(_parsed, llm, body, prompt, size) for prompt in prompts]
            outputs = await self._outputs(call, model, first, parsed, "input")
            reply = await self._reply(model.name, outputs, body.get("encoding_format") == "base64")
        await call.answer(200, reply, id_headers(first.request_id))

    async def _reply(self, model: str, outputs: list[RequestOutput], as_text: bool) -> Parts:
        """Each embedding is a list of numbers, or text in base64 of little-endian float32."""
        data, portioned = [], self._shared.portions.answer()
        for index, output in enumerate(outputs):
            numbers = _numbers(output)
            if as_text:
                values = portions.encoded(base64.b64encode(numbers.tobytes()).decode())
            else:
                values = await long_array(portioned, numbers, convert=lambda part: np.asarray(part).tolist())
            data.append(
                with_members(portions.encoded({"object": "embedding", "index": index}), {"embedding": values})
            )
        usage = replies.usage_sum([replies.usage(output, 0) for output in outputs])
        return with_members(
            portions.encoded({"model": model, "object": "list", "usage": usage}), {"data": array(data)}
        )


async def _parsed(llm: AsyncLLM, body: Body, prompt: Prompt, size: int) -> ParsedRequest:
    special = body.get("add_special_tokens", True)
    read: Callable[[], Prompt] = lambda: prompt  # noqa: E731
    if isinstance(prompt, str) and not special:
        embedder = llm.backend.limits.embedder
        read = partial(llm.tokenizer.encode, ("" if embedder is None else embedder.prompt) + prompt, False)
    return ParsedRequest(
        params=SamplingParams(),
        prompt=read,
        bytes=size,
        **level_of(body),
        embedding={name: body.get(name) for name in ("pooling", "normalize", "dimensions")},
    )


def _numbers(output: RequestOutput) -> Any:
    """The numbers of a finished request, little-endian float32."""
    assert output.embedding is not None
    return output.embedding.astype("<f4")


class TextsToScore(NamedTuple):
    """The texts of a request.

    Attributes:
        names: the request's names for queries and documents.
    """

    queries: str | list[str]
    documents: str | list[str]
    names: tuple[str, str]


class ScoringResult(NamedTuple):
    """A request with its scores, in the order of its documents."""

    request_id: str
    model: str
    body: Body
    texts: TextsToScore
    scores: list[float]
    usage: replies.Usage


class ScoringPath(NamedTuple):
    """What differs between the paths.

    Attributes:
        read: raises InvalidArgument.
        reply: an object for JSON.
    """

    path: str
    form: BodyFields
    read: Callable[[Body], TextsToScore]
    reply: Callable[[ScoringResult], dict[str, Any]]


class ScoringService(HttpService):
    """Scores pairs of texts with an embedding model or a reranker."""

    def __init__(self, shared: Shared, most_bytes: int, kind: ScoringPath) -> None:
        super().__init__(shared, most_bytes)
        self.PATH, self._kind = kind.path, kind

    async def _create(self, call: HttpCall, json_body: dict[str, Any], size: int, request_id: str) -> None:
        with self._tracker.track(f"POST {self.PATH}", request_id, call) as first:
            self._admission.stream(call)
            body, model = await self._read(self._kind.form, json_body, call, first)
            texts = self._kind.read(body)
            llm, names = model.llm, dict(zip(("queries", "documents"), texts.names, strict=True))
            call.names = names
            scoring = scoring_of(
                texts.queries, texts.documents, body.get("instruction"), llm.backend.limits, llm.tokenizer
            )
            if not scoring.embeds:
                self._check_prompts(texts, len(scoring.pairs), body.get("instruction", ""))
            judged: dict[int, TokensPrompt] = {}  # of the last position

            async def parsed(index: int) -> ParsedRequest:
                task = scoring.tasks[index]
                listed = isinstance(getattr(texts, task.side), list)
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
            outputs = await self._outputs(call, model, first, prompts, texts.names[1])
            # Thousands of long vectors take tens of milliseconds to compare.
            work = sum(0 if output.embedding is None else output.embedding.nbytes for output in outputs)
            scores = await self._text_work.run(client_of(call), work, partial(scoring.scores, outputs))
            usage = replies.usage_sum([replies.usage(output, 0) for output in scoring.prompts(outputs)])
            reply = self._kind.reply(ScoringResult(first.request_id, model.name, body, texts, scores, usage))
        await call.answer(200, msgspec.json.encode(reply), id_headers(first.request_id))

    def _check_prompts(self, texts: TextsToScore, pairs: int, instruction: str) -> None:
        """A reranker's prompts repeat the query. In all, they may have as many characters as a body has
        bytes.
        """
        queries = [texts.queries] if isinstance(texts.queries, str) else texts.queries
        size = (
            sum(map(len, queries)) * pairs // len(queries)
            + sum(map(len, texts.documents))
            + len(instruction) * pairs
        )
        if size > self._most_bytes:
            limit = (
                f"at most {self._most_bytes} (max_message_bytes); each of the {pairs} prompts has its query"
            )
            raise InvalidArgument(texts.names[0], f"{size} characters in all prompts", limit)


def _check_count(name: str, texts: str | list[Any]) -> None:
    if isinstance(texts, list) and len(texts) > MOST_PROMPTS:
        raise InvalidArgument(name, f"{len(texts)} texts", f"at most {MOST_PROMPTS}")


def _pairs(body: Body) -> TextsToScore:
    """The texts to score, under one of the names that vLLM has given them."""
    used_names = [names for names in SIDES if body.fields.keys() & set(names)]
    if len(used_names) > 1:
        raise InvalidArgument(
            used_names[1][0],
            body.get(used_names[1][0]),
            f"{used_names[0][0]} and {used_names[0][1]} are given too",
        )
    names = used_names[0] if used_names else SIDES[0]
    for name in names:
        if name not in body.fields:
            raise InvalidArgument(name, None, "must be given")
        _check_count(name, body.get(name))
    return TextsToScore(body.get(names[0]), body.get(names[1]), names)


def _scores(result: ScoringResult) -> dict[str, Any]:
    return {
        "id": f"score-{result.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": result.model,
        "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(result.scores)],
        "usage": result.usage,
    }


def _ranking(body: Body) -> TextsToScore:
    """A query, and the documents to rank."""
    for name in ("query", "documents"):
        if name not in body.fields:
            raise InvalidArgument(name, None, "must be given")
    documents, top = body.get("documents"), body.get("top_n", 0)
    _check_count("documents", documents)
    if top < 0:
        raise InvalidArgument("top_n", top, "must be at least 1; 0 returns all documents")
    texts = [document if isinstance(document, str) else document["text"] for document in documents]
    return TextsToScore(body.get("query"), texts, ("query", "documents"))


def _ranked(result: ScoringResult) -> dict[str, Any]:
    """The best documents first; equal ones in the order of the request."""
    order = sorted(range(len(result.scores)), key=lambda i: -result.scores[i])
    results: list[dict[str, Any]] = []
    for i in order[: result.body.get("top_n") or None]:
        shown = (
            {"document": {"text": result.texts.documents[i]}}
            if result.body.get("return_documents", True)
            else {}
        )
        results.append({"index": i, **shown, "relevance_score": result.scores[i]})
    return {
        "id": f"rerank-{result.request_id}",
        "object": "list",
        "model": result.model,
        "results": results,
        "usage": result.usage,
    }


SCORES = ScoringPath("/v1/score", SCORE, _pairs, _scores)
RANKS = ScoringPath("/v1/rerank", RERANK, _ranking, _ranked)
