"""The ASGI application: paths of OpenAI's API, and vLLM's additional ones."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus

import grpc
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jengine.serving.calls.errors import Refusal
from jengine.serving.calls.model_provider import NotReady
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.chat_completions import ChatCompletions
from jengine.serving.http.chat_service import ChatService
from jengine.serving.http.completion_service import CompletionService
from jengine.serving.http.endpoint import Parts, endpoint
from jengine.serving.http.errors import ANTHROPIC, OPENAI, http_error
from jengine.serving.http.messages import body as messages_body
from jengine.serving.http.messages.reply import Messages
from jengine.serving.http.responses import body as responses_body
from jengine.serving.http.responses.earlier import (
    EarlierResponses,
    ResponseStore,
    no_compaction,
    no_websocket,
)
from jengine.serving.http.responses.reply import Responses
from jengine.serving.http.text_service import (
    RANKS,
    SCORES,
    EmbeddingService,
    LoraService,
    ScoringService,
    TextService,
)


def application(parts: Parts, more: Sequence[Route] = ()) -> Starlette:
    """All endpoints, and further routes."""
    shared = parts.shared
    chat, messages = ChatService(shared, ChatCompletions()), ChatService(shared, Messages())
    count = messages.counter(messages_body.read_to_count, lambda tokens: {"input_tokens": tokens})
    store = ResponseStore(parts.config.response_store_bytes)
    earlier = EarlierResponses(store, shared.text_work, parts.config.max_message_bytes)
    responses = ChatService(shared, Responses(store), earlier.expand)
    count_input = responses.counter(
        responses_body.read_to_count,
        lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
    )
    completions, texts, loras = CompletionService(shared), TextService(shared), LoraService(shared)
    scores, ranks = ScoringService(shared, SCORES), ScoringService(shared, RANKS)

    async def health(call: HttpCall) -> None:
        """How many programs of the default model are ready, as JSON; nothing while it is not loaded."""
        if (why := parts.why_not_ready()) is not None:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, why, retry_seconds=shared.models.retry_seconds)
        ready = b""
        with contextlib.suppress(NotReady):
            load = shared.models.llm.load
            ready = msgspec.json.encode({"programs_ready": load.programs_ready, "programs": load.programs})
        await call.answer(200, ready)

    route = partial(endpoint, parts)

    async def wrong(request: Request, error: Exception) -> Response:
        """The answer for an unknown path or method. The existing ones are no secret."""
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase}"
        parts.metrics.http_ended("unknown", "unknown", error.status_code)
        errors = ANTHROPIC if request.url.path.startswith("/v1/messages") else OPENAI
        body = b"".join(errors.body(http_error(Refusal(grpc.StatusCode.NOT_FOUND, message), 0.0)))
        return Response(body, error.status_code, error.headers, "application/json")

    app = Starlette(
        routes=[
            route("GET", "/health", health, open=True),
            route("GET", "/ping", health, open=True),
            route("GET", "/v1/models", texts.models),
            route("GET", "/v1/models/{model:path}", texts.model),
            route("POST", "/v1/chat/completions", chat.create),
            route("POST", "/v1/messages", messages.create, errors=ANTHROPIC),
            route("POST", "/v1/messages/count_tokens", count, errors=ANTHROPIC),
            route("POST", "/v1/responses", responses.create),
            route("POST", "/v1/responses/input_tokens", count_input),
            route("POST", "/v1/responses/compact", no_compaction),
            route("GET", "/v1/responses", no_websocket),
            route("GET", "/v1/responses/{id}", earlier.retrieve),
            route("DELETE", "/v1/responses/{id}", earlier.delete),
            route("POST", "/v1/completions", completions.create),
            route("POST", "/v1/embeddings", EmbeddingService(shared).create),
            *(route("POST", path, scores.create) for path in ("/v1/score", "/score")),
            *(route("POST", path, ranks.create) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
            route("POST", "/v1/load_lora_adapter", loras.load),
            route("POST", "/v1/unload_lora_adapter", loras.unload),
            route("POST", "/tokenize", texts.tokenize),
            route("POST", "/detokenize", texts.detokenize),
            *more,
        ],
        exception_handlers={404: wrong, 405: wrong},
    )
    app.router.redirect_slashes = False
    return app
