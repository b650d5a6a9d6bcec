"""Requests without generated text: the models, tokenizing, embeddings, scores, and loading and unloading
adapters.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jengine import AsyncLLM, InvalidArgument, RequestOutput, SamplingParams, TokensPrompt
from jengine.serving.calls.model_provider import Adapter, ListedModel
from jengine.serving.calls.named_model import listed_model, no_model
from jengine.serving.calls.portions import Parts, array, encoded, long_array, with_members
from jengine.serving.guards.admission import client_of
from jengine.serving.http import replies
from jengine.serving.http.bodies import (
    DETOKENIZE,
    EMBEDDING,
    LOAD_LORA,
    RERANK,
    SCORE,
    TOKENIZE,
    UNLOAD_LORA,
    Body,
    BodyFields,
)
from jengine.serving.http.calls import HttpCall, id_headers
from jengine.serving.http.completion_service import MOST_PROMPTS, Prompt, listed
from jengine.serving.http.endpoint import check_administrator
from jengine.serving.http.service import TEMPLATE_OPTIONS, HttpService, check_conversation, level_of
from jengine.serving.options import LoraModule
from jengine.serving.requests.lora_changes import LoraChanges
from jengine.serving.requests.service import ParsedRequest, Shared, check_ids, check_vocabulary
from jengine.spi import scoring_of

OPTIONS = (*TEMPLATE_OPTIONS, "tools")
TEXT = b"text/plain; charset=utf-8"


STARTED = int(time.time())


class TextService(HttpService):
    """Requests that do not need the engine."""

    async def tokenize(self, call: HttpCall, json_body: dict[str, Any]) -> None:
        body, model = await self._read(TOKENIZE, json_body, call)
        self._admission.stream(call)
        if ("prompt" in body.fields) == ("messages" in body.fields):
            raise InvalidArgument(
                "prompt", body.get("prompt"), "exactly one of prompt and messages must be given"
            )
        check_conversation(body)
        tokenizer, is_chat = model.tokenizer, "messages" in body.fields
        for name in ("add_special_tokens",) if is_chat else OPTIONS:
            # templates write the special tokens themselves
            if name in body.fields and (name, body.get(name)) != ("add_special_tokens", False):
                limit = "is only for prompt" if is_chat else "is only for messages"
                raise InvalidArgument(name, body.get(name), limit)
        if is_chat:
            options = {name: body.get(name) for name in OPTIONS if name in body.fields}
            prompt = await self._render(
                model, lambda: (body.get("messages"), options), body.get("chat_template"), call.size, call
            )
            ids = prompt["prompt_token_ids"]
        else:
            text, special = body.get("prompt"), body.get("add_special_tokens", True)
            ids = await self._work(call, lambda: tokenizer.encode(text, special))
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}

        def encode() -> bytes:
            if body.get("return_token_strs"):
                answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
            return msgspec.json.encode(answer)

        await call.answer(200, await self._work(call, encode))

    async def detokenize(self, call: HttpCall, json_body: dict[str, Any]) -> None:
        body, model = await self._read(DETOKENIZE, json_body, call)
        self._admission.stream(call)
        tokens = body.get("tokens")
        if tokens is None:
            raise InvalidArgument("tokens", None, "must be given")
        check_ids("tokens", len(tokens), model)
        check_vocabulary("tokens", tokens, model)
        tokenizer = model.llm.tokenizer
        text = await self._work(call, lambda: tokenizer.decode_unlocked(tokens, False))
        await call.answer(200, msgspec.json.encode({"prompt": text}))

    async def models(self, call: HttpCall) -> None:
        served = [self._model(model) for model in (*self._models.listed(), *self._models.adapters)]
        if _of_anthropic(call):
            ends = {"first_id": served[0]["id"], "last_id": served[-1]["id"], "has_more": False}
            await call.answer(200, encoded({"data": [_anthropic(shown) for shown in served], **ends}))
            return
        await call.answer(200, encoded({"object": "list", "data": served}))

    async def model(self, call: HttpCall) -> None:
        shown = self._model(listed_model(call.scope["path_params"]["model"], self._models))
        await call.answer(200, encoded(_anthropic(shown) if _of_anthropic(call) else shown))

    def _model(self, model: ListedModel | Adapter) -> dict[str, Any]:
        """A model, with vLLM's fields. `root`: an adapter's path as it was given. `parent`: the model that an
        adapter changes. `max_model_len`: null if the model was never loaded.
        """
        common = {"object": "model", "owned_by": "jengine"}
        default = self._models.listed()[0]
        if isinstance(model, Adapter):
            module = model.module
            return {
                "id": module.name,
                "created": model.created,
                **common,
                "root": module.path,
                "parent": module.base_model_name or default.name,
                "max_model_len": self._models.info.limits.sequence.max_model_len,
                "status": {"value": default.status},
            }
        return {
            "id": model.name,
            "created": STARTED,
            **common,
            "root": model.name,
            "parent": None,
            "max_model_len": None if model.info is None else model.info.limits.sequence.max_model_len,
            "status": {"value": model.status, "why": model.why},
        }


def _of_anthropic(call: HttpCall) -> bool:
    """Whether Anthropic's client asks, which always says the version of its API."""
    return call.header(b"anthropic-version") is not None


def _anthropic(model: dict[str, Any]) -> dict[str, Any]:
    """A model as Anthropic's API describes it."""
    created = datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}


class LoraService(HttpService):
    """For administrators."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._changes = LoraChanges(shared.config, shared.models)

    async def load(self, call: HttpCall) -> None:
        body = await self._change(call, LOAD_LORA)
        name, path = (_text(body.fields, field) for field in ("lora_name", "lora_path"))
        await self._changes.load(call, LoraModule(name, path), body.get("load_inplace", False))
        await self._success(call, name, "added")

    async def unload(self, call: HttpCall) -> None:
        body = await self._change(call, UNLOAD_LORA)
        name, number = body.get("lora_name", ""), body.get("lora_int_id")
        if number is None:
            name = _text(body.fields, "lora_name")
        else:
            named = [adapter.module.name for adapter in self._models.adapters if adapter.number == number]
            if not named:
                raise no_model(name or str(number), self._models)
            if name not in ("", *named):
                raise InvalidArgument(
                    "lora_int_id", number, f"is the number of {named[0]!r}, not of {name!r}"
                )
            [name] = named
        await self._changes.unload(call, name)
        await self._success(call, name, "removed")

    async def _change(self, call: HttpCall, form: BodyFields) -> Body:
        """The body of a request by an administrator."""
        check_administrator(call)
        self._changes.check(call)
        return form.read(await self._json(call))

    async def _success(self, call: HttpCall, name: str, action: str) -> None:
        text = f"Success: LoRA adapter '{name}' {action} successfully."
        await call.answer(200, text.encode("utf-8", "replace"), kind=TEXT)


def _text(fields: dict[str, Any], name: str) -> str:
    if not fields.get(name):
        raise InvalidArgument(name, fields.get(name), "must be given")
    return str(fields[name])


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))  # names of the texts to score


class EmbeddingService(HttpService):
    """Embeds texts and tokens."""

    PATH = "/v1/embeddings"

    async def _create(self, call: HttpCall, json_body: dict[str, Any]) -> None:
        with self._tracked(call, json_body) as first:
            body, model = await self._read(EMBEDDING, json_body, call, first)
            call.names = {"prompt": "input"}
            llm, prompts = model.llm, listed("input", body.get("input"), model)
            parsed = [partial(_parsed, llm, body, prompt, call.size) for prompt in prompts]
            outputs = await self._outputs(call, model, first, parsed, "input")
            reply = await self._reply(model.name, outputs, body.get("encoding_format") == "base64")
        await call.answer(200, reply, id_headers(first.request_id))

    async def _reply(self, model: str, outputs: list[RequestOutput], as_text: bool) -> Parts:
        """Each embedding is a list of numbers, or text in base64 of little-endian float32."""
        data, portions = [], self._shared.portions
        for index, output in enumerate(outputs):
            assert output.embedding is not None
            numbers: Any = output.embedding.astype("<f4")
            if as_text:
                values = encoded(base64.b64encode(numbers.tobytes()).decode())
            else:
                values = await long_array(portions, numbers, convert=lambda part: np.asarray(part).tolist())
            data.append(with_members(encoded({"object": "embedding", "index": index}), {"embedding": values}))
        usage = replies.usage_sum([replies.usage(output, 0) for output in outputs])
        return with_members(
            encoded({"model": model, "object": "list", "usage": usage}), {"data": array(data)}
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

    def __init__(self, shared: Shared, kind: ScoringPath) -> None:
        super().__init__(shared)
        self.PATH, self._kind = kind.path, kind

    async def _create(self, call: HttpCall, json_body: dict[str, Any]) -> None:
        with self._tracked(call, json_body) as first:
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
                        rendered = await self._sandbox.judge(client_of(call), judgement, model.tokenizer)
                        judged[task.position] = {"prompt_token_ids": rendered.token_ids}
                    prompt = partial(judged.__getitem__, task.position)
                return ParsedRequest(
                    task.params or SamplingParams(),
                    prompt,
                    call.size,
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
        if size > (limit_bytes := self._config.max_message_bytes):
            limit = f"at most {limit_bytes} (max_message_bytes); each of the {pairs} prompts has its query"
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
        shown: dict[str, Any] = {}
        if result.body.get("return_documents", True):
            shown = {"document": {"text": result.texts.documents[i]}}
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
