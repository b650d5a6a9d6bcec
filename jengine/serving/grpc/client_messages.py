"""Converts between protobuf messages and the types that users of the client know."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from jengine import CompletionOutput, InvalidArgument, Logprob, RequestOutput, SamplingParams
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc.conversions import REASONS, from_params, sending
from jengine.spi import FinishReason, GenerationParams

# text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; dicts may have a "cache_salt", and
# "multi_modal_data" and "mm_processor_kwargs" as in LLM.generate
Prompt = str | list[int] | dict[str, Any]
Messages = Iterable[Mapping[str, Any]]  # {"role": ..., "content": text, or parts as in LLM.chat}
CHAT_OPTIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)
JSON_OPTIONS = ("tools", "chat_template_kwargs", "mm_processor_kwargs")
SAME = ("request_id", "priority", "cache_salt", "ttft_ms", "tpot_ms", "model")  # options that are fields
FINISH_REASONS = {value: cast(FinishReason, name) for name, value in REASONS.items()}
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


class CallOptions(NamedTuple):
    """The options of a client's method other than the prompt."""

    params: GenerationParams | None
    request_id: str | None
    priority: int | None
    timeout: float | None
    cache_salt: str | None
    ttft_ms: float | None
    tpot_ms: float | None
    model: str | None
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, params: GenerationParams | None, options: dict[str, Any]) -> CallOptions:
        names = (*SAME, "timeout")
        values = {name: options.pop(name, None) for name in names}
        return cls(params=params, fields=options, **values)


# --- requests -------------------------------------------------------------------------------------


def generate_request(prompt: Prompt, call: CallOptions) -> pb.GenerateRequest:
    """Raises InvalidArgument for values that cannot be sent."""
    request = pb.GenerateRequest()
    content: Any = prompt
    if isinstance(prompt, dict):
        content = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")
        call = call._replace(cache_salt=prompt.get("cache_salt", call.cache_salt))
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
    return _completed(request, call, call.fields)


def chat_request(messages: Messages, call: CallOptions) -> pb.ChatRequest:
    """Raises InvalidArgument for values that cannot be sent."""
    request = pb.ChatRequest()
    for i, message in enumerate(messages):
        with sending(f"messages[{i}]", message):
            request.messages.append(_message(f"messages[{i}]", message))
    for name in CHAT_OPTIONS:
        value = call.fields.get(name)
        if value is not None:
            with sending(name, value):
                as_json = name in JSON_OPTIONS
                setattr(
                    request.options,
                    f"{name}_json" if as_json else name,
                    json.dumps(value) if as_json else value,
                )
    return _completed(
        request, call, {name: value for name, value in call.fields.items() if name not in CHAT_OPTIONS}
    )


def _completed[R: (pb.GenerateRequest, pb.ChatRequest)](
    request: R, call: CallOptions, sampling_fields: Mapping[str, Any]
) -> R:
    params = call.params
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
    options = {name: getattr(call, name) for name in SAME} | {"timeout_seconds": call.timeout}
    for name, value in options.items():
        if value is not None:
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
        elif all(part["type"] == "text" for part in content):
            proto.content = "\n".join(part["text"] for part in content)
        else:
            proto.parts.extend(part_of(f"{where}.content[{i}]", part) for i, part in enumerate(content))
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
        """New output of one completion, or the final output. None for the message that confirms the
        request.
        """
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
