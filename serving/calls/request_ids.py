"""Ids of requests, as clients and logs see them."""

from __future__ import annotations

import uuid

import grpc

from jengine.serving.calls.errors import Refusal

MAX_REQUEST_ID = 256  # characters


def new_id() -> str:
    """A random id, unlike AsyncLLM's own. Those can be guessed, so a client could take the next one and block
    another client."""
    return uuid.uuid4().hex


def check_request_id(request_id: str) -> None:
    """Raises Refusal if a client's id is too long: it is repeated in answers, logs and spans."""
    if len(request_id) > MAX_REQUEST_ID:
        message = f"request_id: {len(request_id)} characters; at most {MAX_REQUEST_ID}"
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, message, field="request_id")
