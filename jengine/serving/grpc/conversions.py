"""Converts between protobuf messages and jengine's plain data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from jengine import (
    BeamSearchParams,
    CompletionOutput,
    InvalidArgument,
    Load,
    Logprob,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
)
from jengine.serving.calls.call import NamedImage
from jengine.serving.calls.portions import Portions, width_of
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.spi import GenerationParams, check_entries

NO_LIMIT = 2**31 - 1  # as max_tokens: represents None, since an unset field means the default
REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}
MAX_MESSAGES = 4096  # in a conversation
MAX_TOOLS_BYTES = 2**20  # of tools, and of a template's variables; templates write these in Python
MOST_TOKENS = 1000  # in a message; with MAX_LOGPROBS each, about 600 kB
# fields of SamplingParams that beam searches also have
BEAM_FIELDS = ("max_tokens", "ignore_eos", "temperature", "include_stop_str_in_output")
LOAD_FIELDS = (  # of Load and GetLoadResponse, for every client
    "running", "waiting", "free_pages", "pages", "preemptions", "cached_pages", "strategy", "targets_met",
    "targets_missed", "targets_rejected", "first_token_seconds", "programs_ready", "programs",
)  # fmt: skip
DEFAULTS = {f.name: f.default for f in dataclasses.fields(SamplingParams) if f.name != "output_kind"}

# --- sampling parameters --------------------------------------------------------------------------


def to_params(proto: pb.SamplingParams, default: SamplingParams | None = None) -> GenerationParams:
    """Parameters from the set fields; other fields are taken from `default` or SamplingParams(). See also
    `with_beams`.

    Raises:
        InvalidArgument: naming the field.
    """
    params: dict[str, Any] = {}
    for field, value in proto.ListFields():
        name = field.name
        if not isinstance(value, int | float | pb.StructuredOutputs):
            check_entries(name, len(value))  # before they are copied
        if name == "structured_outputs":
            value = _structured(value)
        elif name == "logit_bias":
            value = dict(value)
        elif name == "max_tokens" and value == NO_LIMIT:
            value = None
        elif not isinstance(value, int | float):
            value = list(value)
        params[name] = value
    return with_beams(params, SamplingParams() if default is None else default)


def with_beams(params: dict[str, Any], default: SamplingParams) -> GenerationParams:
    """Parameters from the given fields; other fields are taken from `default`.

    With use_beam_search, returns BeamSearchParams: `n` is the width, fields that they lack must have neutral
    values, and only max_tokens has its default from `default`.

    Raises:
        InvalidArgument: naming the field.
    """
    params = dict(params)
    searches, penalty = params.pop("use_beam_search", False), params.pop("length_penalty", None)
    if not searches:
        if penalty is not None:
            raise InvalidArgument("length_penalty", penalty, "needs use_beam_search")
        return default.clone(**params)
    params = {"max_tokens": default.max_tokens, **params}
    fields = {name: params.pop(name) for name in BEAM_FIELDS if name in params}
    width = params.pop("n", 1)
    for name, value in params.items():
        if value != DEFAULTS.get(name):
            raise InvalidArgument(
                name, value, f"must not be set with use_beam_search; {', '.join(('n', *BEAM_FIELDS))} may"
            )
    if penalty is not None:
        fields["length_penalty"] = penalty
    try:
        return BeamSearchParams(beam_width=width, **fields)
    except InvalidArgument as wrong:
        raise wrong if wrong.field != "beam_width" else InvalidArgument("n", width, wrong.limit) from None


def from_params(params: GenerationParams, fields: Collection[str] | None = None) -> pb.SamplingParams:
    """All fields, or the named ones, since the server's model may have other defaults.

    Empty lists and None stay unset: no model's defaults replace them, and the protocol cannot express them.

    Raises:
        InvalidArgument: a field cannot hold its value.
    """
    proto = pb.SamplingParams()
    if isinstance(params, BeamSearchParams):
        for name in (*BEAM_FIELDS, "length_penalty", "n"):
            with sending(name, getattr(params, name)):
                setattr(proto, name, getattr(params, name))
        proto.use_beam_search = True
        return proto
    for name in DEFAULTS if fields is None else fields:
        value = getattr(params, name)
        if value == () or (value is None and name != "max_tokens"):
            continue
        with sending(name, value):
            if name == "structured_outputs":
                _set_structured(proto.structured_outputs, value)
            elif name == "logit_bias":
                proto.logit_bias.update(value)
            elif name == "seed":
                proto.seed = value - 2**64 if value >= 2**63 else value
            elif name == "max_tokens":
                proto.max_tokens = NO_LIMIT if value is None else value
            elif isinstance(value, tuple):
                getattr(proto, name).extend(value)
            else:
                setattr(proto, name, value)
    return proto


@contextmanager
def sending(field: str, value: object) -> Iterator[None]:
    """Raises InvalidArgument with the field's name if protobuf rejects the value."""
    try:
        yield
    except InvalidArgument:
        raise
    except (TypeError, ValueError, KeyError) as wrong:
        raise InvalidArgument(field, value, f"cannot be sent: {wrong}") from None


def _structured(proto: pb.StructuredOutputs) -> StructuredOutputs:
    kind = proto.WhichOneof("kind")
    if kind is None:
        return StructuredOutputs()  # rejected, with the reason
    value: Any = list(proto.choice.texts) if kind == "choice" else getattr(proto, kind)
    return StructuredOutputs(**{str(kind): value})


def _set_structured(proto: pb.StructuredOutputs, value: StructuredOutputs) -> None:
    if value.json is not None:
        proto.json = value.json if isinstance(value.json, str) else json.dumps(value.json)
    elif value.regex is not None:
        proto.regex = value.regex
    elif value.choice is not None:
        proto.choice.texts.extend(value.choice)
    elif value.grammar is not None:
        proto.grammar = value.grammar


# --- prompts --------------------------------------------------------------------------------------


def check_messages(messages: Sized) -> None:
    """Raises InvalidArgument if there are more than MAX_MESSAGES, before they are processed."""
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgument("messages", f"{len(messages)} messages", f"at most {MAX_MESSAGES}")


def to_messages(messages: Sequence[pb.ChatMessage]) -> list[dict[str, Any]]:
    """Messages for AsyncLLM.chat, with the set fields only.

    Raises:
        InvalidArgument: tool calls that are not JSON, or an empty part.
    """
    out = []
    for i, message in enumerate(messages):
        fields = {field.name: value for field, value in message.ListFields()}
        if "parts" in fields:
            if "content" in fields:
                raise InvalidArgument(f"messages[{i}].parts", "given", "must be absent beside content")
            parts = enumerate(fields.pop("parts"))
            fields["content"] = [_part(f"messages[{i}].parts[{j}]", part) for j, part in parts]
        if "tool_calls_json" in fields:
            fields["tool_calls"] = _json(
                f"messages[{i}].tool_calls_json", fields.pop("tool_calls_json"), list
            )
        out.append(fields)
    return out


def to_images(images: Sequence[pb.Image]) -> list[NamedImage]:
    """Raises InvalidArgument if one is empty."""
    return [_image(f"images[{i}]", image) for i, image in enumerate(images)]


def to_processing(text: str) -> dict[str, Any]:
    """Raises InvalidArgument if it is not a JSON object."""
    processing: dict[str, Any] = _json("mm_processor_kwargs_json", text, dict)
    return processing


def _part(where: str, part: pb.ContentPart) -> dict[str, Any]:
    if part.HasField("image"):
        return {"type": "image", "image": _image(f"{where}.image", part.image)}
    if not part.HasField("text"):
        raise InvalidArgument(where, None, "must be a text or an image")
    return {"type": "text", "text": part.text}


def _image(where: str, image: pb.Image) -> NamedImage:
    kind = image.WhichOneof("source")
    if kind is None:
        raise InvalidArgument(where, None, "must have data or url")
    return NamedImage(image.data if kind == "data" else image.url, f"{where}.{kind}")


def to_options(options: pb.ChatOptions) -> dict[str, Any]:
    """ChatOptions with the set fields only.

    Raises:
        InvalidArgument: invalid JSON, JSON of another type, or more than MAX_TOOLS_BYTES.
    """
    fields: dict[str, Any] = {field.name: value for field, value in options.ListFields()}
    for name, kind in (("tools", list), ("chat_template_kwargs", dict), ("mm_processor_kwargs", dict)):
        if f"{name}_json" in fields:
            fields[name] = _json(f"options.{name}_json", fields.pop(f"{name}_json"), kind)
    return fields


def _json(where: str, text: str, kind: type) -> Any:
    if len(text) > MAX_TOOLS_BYTES:
        raise InvalidArgument(where, f"{len(text)} characters", f"at most {MAX_TOOLS_BYTES}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise InvalidArgument(where, text, f"must be JSON: {'an array' if kind is list else 'an object'}")
    return value


# --- outputs --------------------------------------------------------------------------------------


async def response(output: RequestOutput, model: str, portions: Portions) -> pb.GenerateResponse:
    """A complete finished output."""
    whole = pb.GenerateResponse(
        request_id=output.request_id,
        model=model,
        usage=usage(output, sum(len(completion.token_ids) for completion in output.outputs)),
        timings=timings(output),
    )
    for completion in output.outputs:
        part = whole.completions.add(
            index=completion.index,
            text=completion.text,
            token_ids=completion.token_ids,
            ending=ending(completion),
        )
        await _add_logprobs(part.logprobs, completion.logprobs, portions)
    await _add_logprobs(whole.prompt_logprobs, output.prompt_logprobs, portions)
    return whole


def deltas(completion: CompletionOutput) -> Iterator[pb.GenerateStreamResponse]:
    """Messages for the new part of a completion, as in AsyncLLM's output_kind="delta".

    One message, or several if tokens of a slow reader have accumulated, each far below the 4 MB that clients
    accept by default.
    """
    text, ids, chosen = completion.text, completion.token_ids, completion.logprobs
    if not (text or ids):
        return
    for start in range(0, len(ids) or 1, MOST_TOKENS):
        end = start + MOST_TOKENS
        news = {"index": completion.index, "text": "" if start else text, "token_ids": ids[start:end]}
        if chosen:
            news["logprobs"] = logprobs(chosen[start:end])
        # built around the delta, since passing a pb.Delta would copy it
        yield pb.GenerateStreamResponse(delta=news)


async def finished(
    output: RequestOutput,
    completion_tokens: int,
    prompt_logprobs: list[dict[int, Logprob] | None] | None,
    portions: Portions,
) -> pb.GenerateStreamResponse:
    """The end of a stream; of its last output, only what is not counted in tokens."""
    end = pb.Finished(
        endings=[ending(completion) for completion in output.outputs],
        usage=usage(output, completion_tokens),
        timings=timings(output),
    )
    await _add_logprobs(end.prompt_logprobs, prompt_logprobs, portions)
    return pb.GenerateStreamResponse(finished=end)


def ending(completion: CompletionOutput) -> pb.Ending:
    end = pb.Ending(index=completion.index, finish_reason=REASONS[completion.finish_reason])  # type: ignore[index]
    if isinstance(completion.stop_reason, str):
        end.stop_text = completion.stop_reason
    elif completion.stop_reason is not None:
        end.stop_token_id = completion.stop_reason
    if completion.cumulative_logprob is not None:
        end.cumulative_logprob = completion.cumulative_logprob
    for first, version in completion.weights_versions:
        kind = "name" if isinstance(version, str) else "number"
        end.weights_versions.add(first_token=first, **{kind: version})
    return end


def usage(output: RequestOutput, completion_tokens: int) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=completion_tokens,
        cached_prompt_tokens=output.num_cached_tokens or 0,
    )


def load(now: Load, counters: bool) -> pb.GetLoadResponse:
    """`counters`: whether to include those of the prefix cache."""
    proto = pb.GetLoadResponse(**{name: getattr(now, name) for name in LOAD_FIELDS})
    if counters:
        proto.prefix_queries, proto.prefix_hits = now.prefix_queries, now.prefix_hits
        proto.evictions = now.evictions
        proto.hit_pages.update(zip(now.cache_groups, now.hit_pages, strict=True))
    return proto


def timings(output: RequestOutput) -> pb.Timings:
    metrics = output.metrics
    first = None if metrics.first_token is None else metrics.first_token - metrics.arrival
    total = 0.0 if metrics.finished is None else metrics.finished - metrics.arrival
    return pb.Timings(first_token_seconds=first, total_seconds=total, preemptions=metrics.preemptions)


async def _add_logprobs(
    to: Any, positions: Sequence[dict[int, Logprob] | None] | None, portions: Portions
) -> None:
    """Adds positions in portions, and lets other requests run in between."""
    async for part in portions.slices(positions or (), width_of(positions or ())):
        to.extend(logprobs(part))


def logprobs(positions: Iterable[Mapping[int, Logprob] | None] | None) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            entries=[
                pb.Logprob(
                    token_id=token,
                    logprob=entry.logprob,
                    rank=entry.rank,
                    decoded_token=entry.decoded_token or "",
                )
                for token, entry in (position or {}).items()
            ]
        )
        for position in positions or ()
    ]
