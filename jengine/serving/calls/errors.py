"""Errors as clients see them: a gRPC status with google.rpc details."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import traceback
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status

from jengine import EngineDead, InvalidArgument, ModelError, SamplingParams
from jengine.serving.calls.model_provider import RESTART_SECONDS, NotReady

log = logging.getLogger("jengine.serving")

DETAILS_KEY = "grpc-status-details-bin"
LONGEST_MESSAGE = 500  # characters: a status is sent in headers, whose size is limited

# Places of jengine's error fields in requests; others have the same place, or are in sampling_params.
PATHS = {
    "prompt_token_ids": "prompt",
    "timeout": "timeout_seconds",
    "add_generation_prompt": "options.add_generation_prompt",
    "continue_final_message": "options.continue_final_message",
    "tools": "options.tools_json",
    "arguments": "arguments_json",
    "chat_template": "options.chat_template",
    "chat_template_kwargs": "options.chat_template_kwargs_json",
}
PROMPTS = ("prompt", "prompt_token_ids", "messages", "system", "input", "instructions")
MAX_FIELDS = 2**15  # in a request and its submessages
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5  # wire types


class Refusal(Exception):
    """A request that is not answered, as a gRPC status; see http/errors.py for HTTP.

    Attributes:
        cause: one word for logs and metrics; by default the code's name.
        field: the field of the request at fault, if any.
        retry_seconds: when a retry is worthwhile.
        resource: (kind, name) of something that is missing, or already exists.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        cause: str = "",
        field: str | None = None,
        retry_seconds: float | None = None,
        resource: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.cause = code, message[:LONGEST_MESSAGE], cause or code.name.lower()
        self.field, self.retry_seconds, self.resource = field, retry_seconds, resource


class Busy(Refusal):
    """The server is overloaded; the client should retry after this time."""

    retry_seconds: float

    def __init__(self, message: str, retry_seconds: float = 1.0, cause: str = "") -> None:
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        super().__init__(code, message, cause=cause, retry_seconds=retry_seconds)


def not_found(kind: str, name: str, message: str) -> Refusal:
    return Refusal(grpc.StatusCode.NOT_FOUND, message, resource=(kind, name[:LONGEST_MESSAGE]))


def in_use(request_id: str, why: str) -> Refusal:
    """Another request has this id."""
    resource = "request", request_id[:LONGEST_MESSAGE]
    return Refusal(grpc.StatusCode.ALREADY_EXISTS, f"request_id={request_id!r}: {why}", resource=resource)


def parser(kind: type[Message]) -> Callable[[bytes], Message | bytes]:
    """Returns a parser for this message type. Invalid messages, and those with too many fields, stay bytes
    for `checked` to reject.

    An error raised where gRPC reads messages would become UNKNOWN, with a traceback in the log.
    """

    def parse(raw: bytes) -> Message | bytes:
        if has_too_many_fields(raw, kind.DESCRIPTOR):
            return raw
        try:
            return kind.FromString(raw)
        except DecodeError:
            return raw

    return parse


def checked[T](request: T) -> T:
    """Raises Refusal for a message that `parser` could not read."""
    if isinstance(request, bytes):
        raise Refusal(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the message cannot be parsed as the type in the service's proto, or has more than {MAX_FIELDS}"
            " fields",
        )
    return request


def refusal(error: Exception, retry_seconds: float = RESTART_SECONDS) -> Refusal:
    """The status for an error. Unexpected errors reveal nothing, since they may quote a prompt.
    retry_seconds: see ModelProvider.
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, InvalidArgument):
        return _invalid(error)
    if isinstance(error, ModelError):
        where = "" if error.tensor is None else f"tensor {error.tensor}: "
        return Refusal(grpc.StatusCode.FAILED_PRECONDITION, where + error.reason)
    if isinstance(error, NotReady):
        return Refusal(grpc.StatusCode.UNAVAILABLE, str(error), retry_seconds=retry_seconds)
    if isinstance(error, EngineDead):
        return Refusal(
            grpc.StatusCode.UNAVAILABLE, "the engine is not running; try again", retry_seconds=retry_seconds
        )
    return Refusal(grpc.StatusCode.INTERNAL, f"internal server error ({type(error).__name__}); see its log")


def log_unexpected(error: Exception, where: str) -> None:
    """Logs where an error was raised, without its message, which may quote a prompt."""
    lines = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s in %s:\n%s", type(error).__name__, where, lines)


def status_metadata(refused: Refusal) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata with a refusal's details."""
    details = _details(refused)
    if not details:
        return ()
    status = Status(code=refused.code.value[0], message=refused.message)
    for detail in details:
        packed = AnyProto()
        packed.Pack(detail)
        status.details.append(packed)
    return ((DETAILS_KEY, status.SerializeToString()),)


def reported(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Decorates a service's method: errors become statuses. The service must have a ModelProvider,
    `_models`.
    """

    @functools.wraps(handler)
    async def method(service: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            try:
                return await handler(service, checked(request), context)
            except grpc.aio.BaseError:
                raise
            except Exception as error:
                refused = refusal(error, service._models.retry_seconds)
                if refused.code is grpc.StatusCode.INTERNAL:
                    log_unexpected(error, handler.__name__)
                await context.abort(refused.code, refused.message, status_metadata(refused))
        except grpc.aio.InternalError:
            # the client disconnected during a send, which gRPC would log as an error
            raise asyncio.CancelledError from None

    return method


def _invalid(error: InvalidArgument) -> Refusal:
    root = root_of(error.field)
    path = (
        f"sampling_params.{error.field}"
        if root in SamplingParams.__dataclass_fields__
        else PATHS.get(root, root) + error.field[len(root) :]
    )
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message_with(error, path), field=path)


def root_of(field: str) -> str:
    """The first name of a path, such as `messages` of `messages[0].role`."""
    return re.split(r"[.\[]", field, maxsplit=1)[0]


def message_with(error: InvalidArgument, name: str) -> str:
    """An error's message with this name of its field, and without prompts, since it may be logged."""
    quotes = root_of(error.field) in PROMPTS
    return f"{name}: {error.limit}" if quotes else str(error).replace(error.field, name, 1)


def _details(refused: Refusal) -> list[Message]:
    details: list[Message] = []
    if refused.field is not None:
        violation = BadRequest.FieldViolation(field=refused.field, description=refused.message)
        details.append(BadRequest(field_violations=[violation]))
    if refused.resource is not None:
        kind, name = refused.resource
        details.append(ResourceInfo(resource_type=kind, resource_name=name))
    if refused.retry_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(int(refused.retry_seconds * 1e9))
        details.append(RetryInfo(retry_delay=delay))
    return details


def has_too_many_fields(raw: bytes, descriptor: Descriptor, limit: int = MAX_FIELDS) -> bool:
    """Whether a message of this type has more than `limit` fields. Malformed messages are left to the parser.

    Protobuf parses a message in one call that holds the interpreter's lock. For 4 MB of empty submessages
    this takes 0.1 s, during which the event loop serves no other request. Requests within jengine's limits
    have few fields, since token ids are packed into one.

    Stops at the limit, so it takes at most about 20 ms. Short messages are not scanned.
    """
    if len(raw) <= 2 * limit:  # a field has at least a tag and a byte
        return False
    left = limit
    spans = [(0, len(raw), descriptor)]
    try:
        while spans:
            at, end, kind = spans.pop()
            messages = _message_fields(kind)
            while at < end:
                left -= 1
                if left < 0:
                    return True
                tag, at = _varint(raw, at)
                wire_type = tag & 7
                if wire_type == DELIMITED:
                    size, at = _varint(raw, at)
                    if (inner := messages.get(tag >> 3)) is not None:
                        spans.append((at, min(at + size, end), inner))
                    at += size
                elif wire_type == VARINT:
                    _, at = _varint(raw, at)
                elif wire_type in (FIXED64, FIXED32):
                    at += 8 if wire_type == FIXED64 else 4
                else:
                    return False
    except IndexError:
        pass
    return False


@cache
def _message_fields(kind: Descriptor) -> dict[int, Descriptor]:
    """The types of message fields, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number, and the position after it. Raises IndexError if the bytes end before."""
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("malformed varint")
