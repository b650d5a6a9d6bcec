"""A client's calls: stubs, messages as the types that users know, errors, and what is retried."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

from jengine import CompletionOutput, InvalidArgument, JengineError, Logprob, RequestOutput, SamplingParams
from jengine.serving.calls.call import rpc_kind
from jengine.serving.calls.errors import DETAILS_KEY
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.conversions import REASONS, from_params, sending
from jengine.spi import FinishReason, GenerationParams

FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.2, 2.0, 5.0  # seconds, if the server does not say
POLL_SECONDS = 1.0  # between two looks at a server that starts
HINTS = {  # by what gRPC says of a server that does not answer
    "Socket closed": "; if the server has TLS, connect with tls (--tls)",
    "Failed parsing HTTP/2": "; this may be the server's HTTP port: use its gRPC port, 50051 by default",
}


class ServerError(JengineError):
    """The server answered with an error, or could not be reached.

    Attributes:
        code: the gRPC status.
        retry_seconds: when to retry, if the server said so.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_seconds: float | None = None) -> None:
        self.code, self.message, self.retry_seconds = code, message, retry_seconds
        super().__init__(f"{message} ({code.name})")


def exception_of(error: grpc.RpcError, request: Message) -> JengineError:
    """InvalidArgument if the server named a field of the request, otherwise ServerError."""
    for violation in _details(error, BadRequest()).field_violations:
        field = violation.field.removeprefix("sampling_params.")
        _, _, limit = violation.description.partition(": ")
        return InvalidArgument(field, _value_at(request, violation.field), limit or violation.description)
    details = error.details() or "no details"
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        details += "".join(hint for sign, hint in HINTS.items() if sign in details)
    return ServerError(error.code(), details, retry_seconds(error))


def retry_seconds(error: grpc.RpcError) -> float | None:
    """The retry delay requested by the server."""
    info = _details(error, RetryInfo())
    return info.retry_delay.ToNanoseconds() / 1e9 if info.HasField("retry_delay") else None


def _details[D: Message](error: grpc.RpcError, kind: D) -> D:
    """The status's detail of this type; empty if there is none."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                status = Status.FromString(value)
            except DecodeError:  # not from this server
                continue
            for detail in status.details:
                if detail.Unpack(kind):
                    return kind
    return kind


def _value_at(request: Message, path: str) -> object:
    """The value sent in this field; None if the path is not a field of the request."""
    value: object = request
    for name in path.split("."):
        if isinstance(value, Message) and name in value.DESCRIPTOR.oneofs_by_name:
            name = value.WhichOneof(name) or ""
        value = getattr(value, name, None)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often and how long a client retries a request.

    Args:
        attempts: the most attempts, the first included.
        seconds: no attempt begins later than this after the first.
    """

    attempts: int = 6
    seconds: float = 60.0


class Attempts:
    """The attempts of one request."""

    def __init__(self, retries: Retries) -> None:
        self._left = retries.attempts - 1
        self._until = time.monotonic() + retries.seconds
        self._pause = FIRST_PAUSE

    def pause(self, error: grpc.RpcError) -> float | None:
        """Seconds to wait before the next attempt; None if the error is final.

        A busy server says when to retry. If it reports exhaustion without a delay (a message is too large),
        retrying would not help. An unreachable server is retried after growing pauses. Up to a quarter is
        added to each pause, so that clients do not all retry at the same time.
        """
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            return None
        delay = retry_seconds(error)
        if delay is None:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return None
            delay, self._pause = self._pause, min(self._pause * PAUSE_GROWTH, LONGEST_PAUSE)
        pause = delay * random.uniform(1.0, 1.25)
        if self._left == 0 or time.monotonic() + pause > self._until:
            return None
        self._left -= 1
        return pause


class StartWait:
    """The attempts to reach a server that starts. While it says so, they are not limited in number, only by
    `seconds`.
    """

    def __init__(self, retries: Retries, seconds: float, progress: Callable[[str], None]) -> None:
        self._attempts, self._until, self._progress = Attempts(retries), time.monotonic() + seconds, progress

    def pause(self, error: grpc.RpcError) -> float | None:
        """Seconds until the next attempt, see Attempts.pause. Passes what the server says to `progress`."""
        left, delay = self._until - time.monotonic(), retry_seconds(error)
        if error.code() is not grpc.StatusCode.UNAVAILABLE or delay is None:
            pause = self._attempts.pause(error)
        else:
            self._progress(error.details() or "")
            pause = min(delay, POLL_SECONDS)
        return None if pause is None or left <= 0.0 else min(pause, left)


class GenerateServiceStub:
    """Has a function for each method of the service, as the classes that protoc generates.

    Args:
        channel: of grpc or grpc.aio.
    """

    SERVICE = pb.DESCRIPTOR.services_by_name["GenerateService"]

    def __init__(self, channel: Any) -> None:
        for method in self.SERVICE.methods:
            call = getattr(channel, rpc_kind(method.client_streaming, method.server_streaming))(
                f"/{self.SERVICE.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.SERVICE.full_name} has no method {name}")


# text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; dicts may have a "cache_salt", and
# "multi_modal_data" and "mm_processor_kwargs" as in LLM.generate
Prompt = str | list[int] | dict[str, Any]
Messages = Iterable[Mapping[str, Any]]  # {"role": ..., "content": text, or parts as in LLM.chat}
# fields of ChatOptions by options, of which some are sent as JSON
CHAT_FIELDS = {field.name.removesuffix("_json"): field.name for field in pb.ChatOptions.DESCRIPTOR.fields}
SAME = ("request_id", "priority", "cache_salt", "ttft_ms", "tpot_ms", "model")
FIELDS = {**{name: name for name in SAME}, "timeout": "timeout_seconds"}  # of requests, by options
FINISH_REASONS = {value: cast(FinishReason, name) for name, value in REASONS.items()}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of an answer's reasoning
SCHEMES = ("data", "http", "https", "file")
PARTS = ("image_url", "image", "image_pil")  # types of a message's parts, and the fields that have the image


class Usage(NamedTuple):
    """Tokens of a request. `cached_prompt_tokens` counts those that the first completion took from the prefix
    cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclass(slots=True, kw_only=True)
class ServedOutput(RequestOutput):
    """A RequestOutput from a server. `prompt_token_ids` are the ids that the client sent; the times in
    `metrics` are seconds since the request arrived.

    Attributes:
        model: the name of the model that answered.
        usage: None until the request has finished.
    """

    model: str = ""
    usage: Usage | None = None


# --- requests -------------------------------------------------------------------------------------


def generate_request(
    prompt: Prompt, params: GenerationParams | None, options: Mapping[str, Any]
) -> pb.GenerateRequest:
    """Raises InvalidArgument for values that cannot be sent."""
    request = pb.GenerateRequest()
    content: Any = prompt
    if isinstance(prompt, dict):
        content = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")
        if "cache_salt" in prompt:
            options = {**options, "cache_salt": prompt["cache_salt"]}
        images = (prompt.get("multi_modal_data") or {}).get("image") or []
        for i, image in enumerate(images if isinstance(images, list | tuple) else [images]):
            request.images.append(image_of(f"multi_modal_data.image[{i}]", image))
        if (processing := prompt.get("mm_processor_kwargs")) is not None:
            with sending("mm_processor_kwargs", processing):
                request.mm_processor_kwargs_json = json.dumps(processing)
    if isinstance(content, str):
        with sending("prompt", content):
            request.text = content
    else:
        with sending("prompt_token_ids", content):
            request.token_ids.ids.extend(content)
    return _completed(request, params, options)


def chat_request(
    messages: Messages, params: GenerationParams | None, options: Mapping[str, Any]
) -> pb.ChatRequest:
    """Raises InvalidArgument for values that cannot be sent."""
    request = pb.ChatRequest()
    for i, message in enumerate(messages):
        with sending(f"messages[{i}]", message):
            request.messages.append(_message(f"messages[{i}]", message))
    others = dict(options)
    for name, field in CHAT_FIELDS.items():
        if (value := others.pop(name, None)) is not None:
            with sending(name, value):
                setattr(request.options, field, json.dumps(value) if field.endswith("_json") else value)
    return _completed(request, params, others)


def _completed[R: (pb.GenerateRequest, pb.ChatRequest)](
    request: R, params: GenerationParams | None, options: Mapping[str, Any]
) -> R:
    """Adds the options that are fields of requests, and the sampling parameters, or their fields."""
    sampling_fields = {name: value for name, value in options.items() if name not in FIELDS}
    if params is not None and sampling_fields:
        raise InvalidArgument(
            "sampling_params",
            params,
            f"cannot be combined with its fields as keywords: {', '.join(sampling_fields)}",
        )
    if params is None:  # fields that are not given have the defaults of the server's model
        request.sampling_params.CopyFrom(from_params(SamplingParams(**sampling_fields), sampling_fields))
    else:
        request.sampling_params.CopyFrom(from_params(params))
    for option, name in FIELDS.items():
        if (value := options.get(option)) is not None:
            with sending(name, value):
                setattr(request, name, value)
    return request


def _message(where: str, message: Mapping[str, Any]) -> pb.ChatMessage:
    proto = pb.ChatMessage(
        **{name: message[name] for name in ("role", "name", "tool_call_id") if message.get(name) is not None}
    )
    content = message.get("content")
    if content is not None:
        if isinstance(content, str):
            proto.content = content
        elif all(isinstance(part, str) or part["type"] == "text" for part in content):
            proto.content = "\n".join(part if isinstance(part, str) else part["text"] for part in content)
        else:
            proto.parts.extend(part_of(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    thoughts = [message[name] for name in THOUGHTS if isinstance(message.get(name), str)]
    proto.reasoning_content = next(filter(None, thoughts), "")
    if message.get("tool_calls"):
        proto.tool_calls_json = json.dumps(message["tool_calls"])
    return proto


# --- outputs --------------------------------------------------------------------------------------


class OutputReader:
    """Converts the responses of one request to outputs."""

    def __init__(self, request: pb.GenerateRequest | pb.ChatRequest) -> None:
        self._prompt = self._ids = None
        if isinstance(request, pb.GenerateRequest):
            self._prompt, self._ids = request.text or None, list(request.token_ids.ids)
        self._request_id = self._model = ""

    def whole(self, response: pb.GenerateResponse) -> ServedOutput:
        self._request_id, self._model = response.request_id, response.model
        output = self._output([self._completion(completion) for completion in response.completions])
        return self._end(output, [completion.ending for completion in response.completions], response)

    def news(self, event: pb.GenerateStreamResponse) -> ServedOutput | None:
        """New output of one completion, or the final output; None for the message that confirms a request."""
        match event.WhichOneof("event"):
            case "delta":
                return self._output([self._completion(event.delta)])
            case "finished":
                endings = event.finished.endings
                output = self._output([CompletionOutput(index=ending.index) for ending in endings])
                return self._end(output, endings, event.finished)
        self._request_id, self._model = event.started.request_id, event.started.model
        return None

    def _output(self, completions: list[CompletionOutput]) -> ServedOutput:
        return ServedOutput(
            request_id=self._request_id,
            model=self._model,
            prompt=self._prompt,
            prompt_token_ids=self._ids or [],
            outputs=completions,
        )

    def _completion(self, proto: pb.Completion | pb.Delta) -> CompletionOutput:
        logprobs = [_position(entries) for entries in proto.logprobs] or None
        return CompletionOutput(
            index=proto.index, text=proto.text, token_ids=list(proto.token_ids), logprobs=logprobs
        )

    def _end(
        self, output: ServedOutput, endings: Iterable[pb.Ending], end: pb.GenerateResponse | pb.Finished
    ) -> ServedOutput:
        output.finished = True
        output.usage = Usage(
            end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_prompt_tokens
        )
        output.num_cached_tokens = output.usage.cached_prompt_tokens
        times, output.metrics.preemptions = end.timings, end.timings.preemptions
        output.metrics.first_token = (
            times.first_token_seconds if times.HasField("first_token_seconds") else None
        )
        output.metrics.finished = times.total_seconds
        output.prompt_logprobs = [_position(entries) or None for entries in end.prompt_logprobs] or None
        for completion, ending in zip(output.outputs, endings, strict=True):
            completion.finish_reason = FINISH_REASONS.get(ending.finish_reason)
            kind = ending.WhichOneof("stop_reason")
            completion.stop_reason = None if kind is None else getattr(ending, kind)
            completion.cumulative_logprob = (
                ending.cumulative_logprob if ending.HasField("cumulative_logprob") else None
            )
            completion.weights_versions = [
                (version.first_token, version.name if version.HasField("name") else version.number)
                for version in ending.weights_versions
            ]
        return output


def _position(proto: pb.TokenLogprobs) -> dict[int, Logprob]:
    return {
        entry.token_id: Logprob(entry.logprob, entry.rank, entry.decoded_token) for entry in proto.entries
    }


def part_of(where: str, part: Mapping[str, Any]) -> pb.ContentPart:
    """A part of a message: {"type": "text", "text": text}, or an image as in LLM.chat.

    Raises:
        InvalidArgument: it is neither, or its file cannot be read.
    """
    kind = part.get("type")
    if kind == "text":
        return pb.ContentPart(text=part["text"])
    if kind not in PARTS:
        raise InvalidArgument(f"{where}.type", kind, f"must be one of text, {', '.join(PARTS)}")
    source = part.get(kind)
    if kind == "image_url" and isinstance(source, Mapping):
        source = source.get("url")
    return pb.ContentPart(image=image_of(f"{where}.{kind}", source))


def image_of(where: str, source: Any) -> pb.Image:
    """An image: bytes, a path, a URL or a Pillow image. Raises InvalidArgument as `part_of`."""
    if isinstance(source, str):
        if source.partition(":")[0].lower() in SCHEMES:
            return pb.Image(url=source)
        source = Path(source)
    if isinstance(source, Path):
        try:
            source = source.read_bytes()
        except OSError as wrong:
            raise InvalidArgument(where, str(source), f"cannot be read: {wrong.strerror}") from None
    elif hasattr(source, "save"):  # Pillow's; not imported here
        file = io.BytesIO()
        source.save(file, "PNG")
        source = file.getvalue()
    if not isinstance(source, bytes | bytearray | memoryview):
        limit = "must be a Pillow image, bytes, a path or a URL"
        raise InvalidArgument(where, type(source).__name__, limit)
    return pb.Image(data=bytes(source))
