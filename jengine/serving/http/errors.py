"""Errors as clients of OpenAI's and Anthropic's APIs expect them: an HTTP status and a JSON body."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from grpc import StatusCode

from jengine import InvalidArgument, PromptTooLong
from jengine.serving.calls.errors import Refusal, message_with, refusal, root_of
from jengine.serving.calls.portions import Parts, encoded
from jengine.serving.http.calls import BadBody, HttpCall

STATUSES = {
    StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    StatusCode.FAILED_PRECONDITION: (400, "invalid_request_error"),
    StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    StatusCode.NOT_FOUND: (404, "not_found_error"),
    StatusCode.ALREADY_EXISTS: (409, "conflict_error"),
    StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
    StatusCode.UNAVAILABLE: (503, "service_unavailable_error"),
}
# places of jengine's error fields in every body; others have the same place
PLACES = {"prompt_token_ids": "prompt"}
RESOURCES = {  # what is missing or exists already: OpenAI's code, and the field at fault
    "model": ("model_not_found", "model"),
    "request": (None, "request_id"),
    "previous_response_id": ("previous_response_not_found", "previous_response_id"),
    "item": (None, "input"),
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class HttpError(NamedTuple):
    """An error response.

    Attributes:
        type, message, param, code: as in OpenAI's API; `param` is the field at fault.
        too_long: the error, if the prompt is too long for the model: APIs have phrases for it, by which
            agents know that they must shorten the conversation.
    """

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = {}
    too_long: PromptTooLong | None = None


class OpenAIErrors:
    """Errors of OpenAI's API. A stream ends with one as its last event."""

    def body(self, error: HttpError) -> Parts:
        """The body of a response."""
        names = "message", "type", "param", "code"
        return encoded({"error": {name: getattr(error, name) for name in names}})

    async def end(self, call: HttpCall, error: HttpError) -> None:
        """Ends a stream that has begun."""
        await call.event(self.body(error))
        await call.end_events()


class AnthropicErrors(OpenAIErrors):
    """Errors of Anthropic's API."""

    def body(self, error: HttpError) -> Parts:
        kind, message = ANTHROPIC_TYPES.get(error.status, "invalid_request_error"), error.message
        if (long := error.too_long) is not None:
            message = f"prompt is too long: {long.tokens} tokens > {long.context - 1} maximum"
        return encoded({"type": "error", "error": {"type": kind, "message": message}})

    async def end(self, call: HttpCall, error: HttpError) -> None:
        await call.event(self.body(error), "error")
        await call.end_events(b"")


OPENAI, ANTHROPIC = OpenAIErrors(), AnthropicErrors()


def http_error(error: Exception, retry_seconds: float, names: Mapping[str, str] | None = None) -> HttpError:
    """The response for an error. Unexpected errors reveal nothing. retry_seconds: see ModelProvider; names:
    see HttpCall.
    """
    if isinstance(error, BadBody):
        return HttpError(error.status, "invalid_request_error", str(error))
    refused = refusal(error, retry_seconds)
    status, kind = STATUSES.get(refused.code, (500, "server_error"))
    if isinstance(error, InvalidArgument):
        root, field = root_of(error.field), PLACES.get(error.field, error.field)
        field = (names or {}).get(PLACES.get(root, root), field)
        if not isinstance(error, PromptTooLong):
            return HttpError(status, kind, message_with(error, field), field)
        # agents look for these words and numbers
        count = f"{error.tokens} tokens{' or more' if error.or_more else ''}"
        message = (
            f"This model's maximum context length is {error.context} tokens. {field} resulted in {count}."
        )
        return HttpError(status, kind, message, field, "context_length_exceeded", too_long=error)
    headers = {}
    if refused.retry_seconds is not None:
        headers = {
            "retry-after": str(math.ceil(refused.retry_seconds)),
            "retry-after-ms": str(math.ceil(1e3 * refused.retry_seconds)),
        }
    code, param = _code(refused)
    return HttpError(status, kind, refused.message, param, code, headers)


def _code(refused: Refusal) -> tuple[str | None, str | None]:
    """OpenAI's code, and the field at fault."""
    if refused.resource is not None and refused.resource[0] in RESOURCES:
        return RESOURCES[refused.resource[0]]
    if refused.code is StatusCode.UNAUTHENTICATED:
        return "invalid_api_key", None
    if refused.code is StatusCode.RESOURCE_EXHAUSTED:
        return "rate_limit_exceeded", None
    return None, refused.field
