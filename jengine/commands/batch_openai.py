"""OpenAI's batch files: lines are requests to its API, records its answers, which may be errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from jengine import EngineDead, InvalidArgument, JengineError
from jengine.commands.batch_lines import (
    Answer,
    Format,
    Key,
    Line,
    Record,
    excerpt,
    json_object,
)

if TYPE_CHECKING:
    from jengine import AsyncLLM

FIELDS = ("custom_id", "method", "url", "body")
ID = "batch_req_"  # prefix of a record's id, before the line's number
MANY = 2**30  # disables the server's limits on clients


def _key(record: Record) -> Key:
    number = int(record["id"].removeprefix(ID))
    return ("line", number) if record["custom_id"] is None else ("id", record["custom_id"])


def _error(record: Record) -> str | None:
    if record["error"] is not None:
        return str(record["error"]["message"])
    if record["response"]["status_code"] != 200:
        return str(record["response"]["body"]["error"]["message"])
    return None


def openai_format(model: str) -> Format:
    """OpenAI's format. model: the model's name that bodies may use."""
    return Format(
        start=json.dumps({"id": ID})[:-2].encode(),
        id="custom_id",
        key=_key,
        error=_error,
        tokens=lambda record: (record["response"]["body"].get("usage") or {}).get("completion_tokens", 0),
        read=_line,
        answering=partial(_answering, model),
    )


def is_batch_line(text: bytes) -> bool:
    """Whether a file with this first line is an OpenAI batch file."""
    try:
        return {"url", "body"} <= json_object(text).keys()
    except (ValueError, RecursionError, JengineError):
        return False


@contextlib.contextmanager
def _answering(model: str, llm: AsyncLLM) -> Iterator[Answer]:
    from jengine.serving.http.embedded import EmbeddedApi, embedded_config

    options = {"max_waiting": MANY, "max_message_bytes": 2**31 - 1, "client_chat_templates": True}
    api = EmbeddedApi(llm, model, embedded_config(options))
    try:
        yield partial(_answer, api.post)
    finally:
        api.close()


def _line(number: int, text: bytes) -> Line:
    name = None
    try:
        fields = json_object(text)
        for field, kind in zip(FIELDS, (str, str, str, dict), strict=True):
            if not isinstance(fields.get(field), kind):
                raise InvalidArgument(
                    field, fields.get(field), "must be an object" if kind is dict else "must be text"
                )
            name = fields["custom_id"]
        if unknown := fields.keys() - {*FIELDS}:
            raise InvalidArgument(
                min(unknown), fields[min(unknown)], f"a batch file's lines may only have {', '.join(FIELDS)}"
            )
        if fields["method"] != "POST":
            raise InvalidArgument("method", fields["method"], "must be POST")
        if not fields["url"].startswith("/v1/"):
            raise InvalidArgument("url", fields["url"], "must be a path such as /v1/chat/completions")
        if fields["body"].get("stream"):
            raise InvalidArgument(
                "body.stream", fields["body"]["stream"], "must be false: batch answers are not streamed"
            )
        return Line(number, name, fields["url"], fields["body"])
    except (ValueError, RecursionError, JengineError) as wrong:
        return Line(number, name, error=str(wrong) or excerpt(text))


async def _answer(post: Callable[[str, bytes], Awaitable[Any]], line: Line) -> Record:
    if line.error is not None:
        return _record(line, None, {"code": "invalid_request", "message": line.error})
    body = json.dumps(line.prompt).encode()
    while True:
        reply = await post(line.kind, body)
        if reply.status != 429:
            break
        await asyncio.sleep(float(reply.headers.get("retry-after-ms", "1000")) / 1000)
    answer: dict[str, Any] = json.loads(reply.body)
    if reply.status == 503:
        raise EngineDead(answer["error"]["message"])
    request_id = reply.headers.get("x-request-id") or answer.get("id", "")
    return _record(line, {"status_code": reply.status, "request_id": request_id, "body": answer}, None)


def _record(line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> Record:
    return {"id": f"{ID}{line.number}", "custom_id": line.name, "response": response, "error": error}
