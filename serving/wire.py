"""What a server and its engine process say to each other, and how it is framed: a length, then a msgpack array.

Only these two hold an end of the socket. What comes is checked for its form all the same: a fault there must not pass for tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from jengine import (
    BeamSearchParams,
    BeamsFound,
    Ended,
    EngineDead,
    InvalidArgument,
    JengineError,
    Limits,
    Load,
    ModelError,
    OutOfMemory,
    Pooled,
    PoolingParams,
    ProfileOptions,
    PromptScores,
    Request,
    SamplingParams,
    StepTotals,
    StrategyName,
    Tokenizer,
    TokenMask,
    TokenUpdate,
    params_of_samples,
)

MAX_FRAME = 1 << 26  # bytes; a request of a million prompt tokens takes 5 MB
RECEIVE = 1 << 18  # bytes taken from the socket at once
TOTALS_SECONDS = 1.0  # between two reports of StepTotals; also, once all is done
TEXT_FIELDS = ("stop", "include_stop_str_in_output", "skip_special_tokens", "detokenize")  # text is made in the server
_DEFAULTS = SamplingParams()
_FIELDS = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in TEXT_FIELDS]
_ERRORS = {"InvalidArgument": InvalidArgument, "ModelError": ModelError, "OutOfMemory": OutOfMemory}


class Garbled(JengineError):
    """What came is no message."""


class TooLarge(JengineError):
    """A message that is larger than the other side reads. Attributes: `size` and `most`, in bytes."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(f"a message of {size} bytes; at most {most}")
        self.size, self.most = size, most


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """One thing said."""


# --- the server says -------------------------------------------------------------------------------


class Configure(Message):
    """First: which engine to start. `options` is a JSON object, for the function `engine`, "module:function"; see engines.py."""

    engine: str
    options: str


class Sample(msgspec.Struct, array_like=True, gc=False):
    """One of a prompt's requests."""

    request_id: str
    sample_index: int


class Add(Message):
    """Queue a prompt's requests.

    Attributes:
        params: of all of them, as a JSON object: msgpack ends at 64 bits, and max_tokens may be any number.
        arrival: seconds, monotonic: one clock for all processes of a machine.
        pooling: they ask for an embedding.
        beams: of those that ask for beams, the BeamSearchParams, as `params`.
    """

    prompt_token_ids: list[int]
    params: str
    samples: list[Sample]
    priority: int
    arrival: float
    cache_salt: str | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    client: str = ""
    pooling: PoolingParams | None = None
    beams: str = ""


class End(Message):
    """Take a request out, if it is still there."""

    request: Ended


class ResetPrefixCache(Message):
    """Forget all cached pages; answered by PrefixCacheReset."""


class TakeTrace(Message):
    """Of the last so many seconds, or all that is kept; answered by TraceTaken."""

    seconds: float | None


class TakeProfile(Message):
    """Leave a profile of the engine's process in a folder; answered by ProfileTaken. One at a time."""

    options: ProfileOptions
    folder: str


class SetStrategy(Message):
    """Compose steps for this; the engine's Limits let it pass."""

    strategy: StrategyName


class Quit(Message):
    """Last."""


Order = Configure | Add | End | ResetPrefixCache | TakeTrace | TakeProfile | SetStrategy | Quit


# --- the engine says -------------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, array_like=True, gc=False):
    """What is known of an engine once it has started; most of it is jengine.Started's."""

    tokenizer_folder: str | None
    dtype: str
    devices: str
    quantization: str = ""
    mesh: dict[str, int] = {}
    programs_compiled: int = 0
    programs_loaded: int = 0
    seconds: dict[str, float] = {}
    sampling_defaults: dict[str, Any] = {}  # of requests that leave them unset, where they are not SamplingParams' own
    longest_step: float = 0.0
    stream_interval: int = 1


class Ready(Message):
    """Once: it has warmed up."""

    limits: Limits
    load: Load
    info: EngineInfo


class Batch(Message):
    """What came of a step, and how busy the engine is after it.

    Attributes:
        totals: of all steps so far, sent every TOTALS_SECONDS; else None.
    """

    tokens: list[TokenUpdate]
    scores: list[PromptScores]
    pooled: list[Pooled]
    beams: list[BeamsFound]
    ended: list[Ended]
    load: Load
    totals: StepTotals | None = None


class PrefixCacheReset(Message):
    """The oldest ResetPrefixCache that has no answer was carried out, and whether that was done. It and TakeTrace are answered in order."""

    done: bool


class TraceTaken(Message):
    """What the oldest TakeTrace that has no answer asked for: Trace.to_json."""

    trace: bytes


class ProfileTaken(Message):
    """The profile is in its folder; else why it is not."""

    why: str


class Failed(Message):
    """Last: the engine could not start, or has stopped. `arguments` are the error's, as a JSON list."""

    kind: str
    arguments: str


Report = Ready | Batch | PrefixCacheReset | TraceTaken | ProfileTaken | Failed


# --- a server and its sandbox's workers -------------------------------------------------------


class Job(Message):
    """Work for a sandbox's worker.

    Attributes:
        kind: "check", a grammar, or "render", a conversation.
        field: of the request, to be named where the job exceeds a limit.
        arguments: JSON object of StructuredOutputs' fields, or of chat_prompt's arguments.
    """

    kind: str
    field: str
    arguments: str


class Done(Message):
    """What came of it: the rendered conversation, or why it is refused; also says that a worker is ready."""

    token_ids: list[int] = []
    field: str = ""
    value: str = ""
    limit: str = ""


# --- frames ----------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytearray:
    """A message as it goes over the socket.

    Raises:
        TooLarge: the other side would not read it, and give up.
    """
    buffer = bytearray(4)
    _encoder.encode_into(message, buffer, 4)
    size = len(buffer) - 4
    if size > MAX_FRAME:
        raise TooLarge(size, MAX_FRAME)
    buffer[:4] = size.to_bytes(4, "little")
    return buffer


class Frames[T]:
    """Bytes as they come, made into messages of a kind, such as Order or Report."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._rest = bytearray()

    def take(self, data: bytes) -> list[T]:
        """The messages that these bytes complete.

        Raises:
            Garbled: they are none.
        """
        rest, at, messages = self._rest, 0, []
        rest += data
        while len(rest) - at >= 4:
            start = at + 4
            size = int.from_bytes(rest[at:start], "little")
            if size > MAX_FRAME:
                raise Garbled(f"a message of {size} bytes; at most {MAX_FRAME}")
            if len(rest) - start < size:
                break
            at = start + size
            try:
                messages.append(self._decoder.decode(rest[start:at]))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise Garbled(f"no message: {error}") from None
        del rest[:at]
        return messages


# --- requests and errors ---------------------------------------------------------------------------


def add_order(requests: tuple[Request, ...]) -> Add:
    """A prompt's requests, without their masks and the prompt's text. All that they share crosses once."""
    first = requests[0]
    samples = [Sample(request.request_id, request.sample_index) for request in requests]
    priority = max(-(2**63), min(first.priority, 2**63 - 1))  # what msgpack holds
    level = priority, first.arrival, first.cache_salt, first.ttft_ms, first.tpot_ms, first.client
    beams = "" if first.beams is None else json.dumps(dataclasses.asdict(first.beams))
    return Add(first.prompt_token_ids, _params_text(first.params), samples, *level, first.pooling, beams)


def has_masks(order: Add) -> bool:
    """Whether `requests_of` makes masks, which may take a while. May be true for nothing."""
    return '"structured_outputs"' in order.params


def requests_of(order: Add, tokenizer: Tokenizer | None) -> list[Request]:
    """The same requests, with fresh masks.

    Raises:
        InvalidArgument: a mask cannot be made here, though the server could.
    """
    params = SamplingParams(**json.loads(order.params))
    first, others = params_of_samples(params)
    beams = BeamSearchParams(**json.loads(order.beams)) if order.beams else None
    masks: Sequence[TokenMask | None] = [None] * len(order.samples)
    if params.masks and tokenizer is not None:
        from jengine import make_masks  # llguidance is imported by those who use it

        masks = make_masks(params, tokenizer, len(order.samples))
    return [
        Request(
            request_id=sample.request_id,
            prompt_token_ids=order.prompt_token_ids,
            params=others if i else first,
            sample_index=sample.sample_index,
            mask=masks[i],
            priority=order.priority,
            arrival=order.arrival,
            cache_salt=order.cache_salt,
            ttft_ms=order.ttft_ms,
            tpot_ms=order.tpot_ms,
            client=order.client,
            pooling=order.pooling,
            beams=beams,
        )
        for i, sample in enumerate(order.samples)
    ]


def _params_text(params: SamplingParams) -> str:
    """Those that differ from the defaults."""
    fields = {name: value for name in _FIELDS if (value := getattr(params, name)) != getattr(_DEFAULTS, name)}
    if params.structured_outputs is not None:
        fields["structured_outputs"] = dataclasses.asdict(params.structured_outputs)  # type: ignore[arg-type]
    return json.dumps(fields)


def failed(error: BaseException) -> Failed:
    """An error on its way to the server."""
    if isinstance(error, InvalidArgument):
        arguments: list[object] = [error.field, error.value, error.limit]
    else:
        arguments = [str(error) if isinstance(error, JengineError) else f"{type(error).__name__}: {error}"]
    return Failed(type(error).__name__, json.dumps(arguments, default=str))


def error_of(message: Failed) -> JengineError:
    """The error as it was, where it is one that users know; else EngineDead."""
    error: JengineError = _ERRORS.get(message.kind, EngineDead)(*json.loads(message.arguments))
    return error
