"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

import msgspec

from jengine.serving.http.calls import HttpCall
from jengine.serving.http.errors import HttpError

TYPES = {
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


class MessagesErrors:
    """An ErrorForm. A stream ends with an error as its last event."""

    def body(self, error: HttpError) -> str:
        kind = TYPES.get(error.status, "invalid_request_error")
        message = error.error.message.encode("utf-8", "replace").decode()
        if (long := error.too_long) is not None:
            message = f"prompt is too long: {long.tokens} tokens > {long.context - 1} maximum"
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}}).decode()

    async def end(self, call: HttpCall, error: HttpError) -> None:
        await call.event(self.body(error), "error")
        await call.end_events(b"")
