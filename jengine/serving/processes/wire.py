"""Messages between a server and its engine process, and their framing: a length, then a msgpack array.

Only these two processes hold an end of the socket. Messages are validated all the same, so that a fault
cannot produce wrong tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from jengine import (
    BeamSearchParams,
    EngineDead,
    InvalidArgument,
    JengineError,
    Load,
    ModelError,
    OutOfMemory,
    PoolingParams,
    PromptTooLong,
    SamplingParams,
    Tokenizer,
)
from jengine.serving.calls.model_provider import EngineInfo
from jengine.spi import (
    BeamsFound,
    Ended,
    ImagePart,
    Limits,
    Pooled,
    PromptImages,
    PromptScores,
    Request,
    StepTotals,
    TokenMask,
    TokenUpdate,
    bound_thinking,
    params_of_samples,
)

MAX_FRAME = 1 << 26  # bytes; a request of a million prompt tokens takes 5 MB
RECEIVE = 1 << 18  # bytes read from the socket at a time
TOTALS_SECONDS = 1.0  # seconds between two reports of StepTotals; a last report follows when all work is done
# used only in the server, which produces text
TEXT_FIELDS = ("stop", "include_stop_str_in_output", "skip_special_tokens", "detokenize", "output_kind")
EQUAL_FIELDS = (  # of Request and Add
    "prompt_token_ids", "arrival", "cache_salt", "ttft_ms", "tpot_ms", "client", "pooling", "lora_name",
    "pages_from",
)  # fmt: skip
MakeMasks = Callable[[SamplingParams, Tokenizer, int], Sequence[TokenMask | None]]
_DEFAULTS = SamplingParams()
_FIELDS = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in TEXT_FIELDS]
_ERRORS = {"InvalidArgument": InvalidArgument, "ModelError": ModelError, "OutOfMemory": OutOfMemory}


class Garbled(JengineError):
    """An invalid message."""


class TooLarge(JengineError):
    """A message larger than the other side accepts. Attributes: `size` and `limit`, in bytes."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a message of {size} bytes; at most {limit}")
        self.size, self.limit = size, limit


class WireMessage(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Base class of messages."""


# --- from the server to the engine
# -----------------------------------------------------------------------------


class Configure(WireMessage):
    """The first message: the engine to start. `options` is a JSON object for the function `engine`,
    "module:function"; see engines.py."""

    engine: str
    options: str


class Picture(WireMessage, gc=False):
    """A part of an image, before the prompt that it belongs to. The fields are those of jengine.ImagePart,
    with arrays as bytes.
    """

    key: int
    pixels: bytes
    places: bytes
    patches: int
    rows: int
    grid: tuple[int, int]


class Pictures(msgspec.Struct, array_like=True, gc=False):
    """The images of a prompt.

    Attributes:
        keys: of its parts, in order; each was sent as a Picture.
        positions: as in jengine.PromptImages.
        parts: not sent; filled in by `Gallery`.
    """

    keys: list[int]
    positions: list[int]
    parts: list[Picture] = []


class PromptSample(msgspec.Struct, array_like=True, gc=False):
    """One of a prompt's requests."""

    request_id: str
    sample_index: int


class Add(WireMessage):
    """Queues a prompt's requests.

    Attributes:
        params: for all of them, as a JSON object: msgpack integers have 64 bits, but max_tokens may be any
            number.
        arrival: monotonic seconds, on the clock that all processes of a machine share.
        pooling: for embeddings.
        beams: for beam searches, the BeamSearchParams, encoded like `params`.
        lora_name: the adapter that they use.
        pictures: of the prompt, if it has any.
        pages_from: where the pages of the prompt are.
    """

    prompt_token_ids: list[int]
    params: str
    samples: list[PromptSample]
    priority: int
    arrival: float
    cache_salt: str | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    client: str = ""
    pooling: PoolingParams | None = None
    beams: str = ""
    lora_name: str | None = None
    pictures: Pictures | None = None
    pages_from: str | None = None


class End(WireMessage):
    """Ends a request, if it is unfinished."""

    request: Ended


class Do(WireMessage):
    """A jengine.Operation by its name, with its arguments as a JSON object. Answered by Answered, with the
    same number.
    """

    number: int
    operation: str
    arguments: bytes


class Quit(WireMessage):
    """The last message."""


Order = Configure | Picture | Add | End | Do | Quit


# --- from the engine to the server
# -----------------------------------------------------------------------------


class Starting(WireMessage):
    """What the engine does before it is ready; see jengine.base.progress.Report. Sent often, any number of
    times.
    """

    work: str
    unit: str
    done: int
    total: int


class Ready(WireMessage):
    """Sent once, after warm-up."""

    limits: Limits
    load: Load
    info: EngineInfo


class StepUpdates(WireMessage):
    """The updates of a step, and the engine's load after it.

    Attributes:
        totals: over all steps so far, sent every TOTALS_SECONDS; otherwise None.
    """

    tokens: list[TokenUpdate]
    scores: list[PromptScores]
    pooled: list[Pooled]
    beams: list[BeamsFound]
    ended: list[Ended]
    load: Load
    totals: StepTotals | None = None


class Failed(WireMessage):
    """The last message: the engine could not start, or has stopped. `arguments` are the error's, as a JSON
    list.
    """

    kind: str
    arguments: str


class Answered(WireMessage):
    """Answers the Do with this number: the operation's answer as JSON, or its error."""

    number: int
    answer: bytes = b""
    error: Failed | None = None


Report = Starting | Ready | StepUpdates | Answered | Failed


# --- a server and its sandbox's workers -------------------------------------------------------


class Job(WireMessage):
    """Work for a sandbox worker.

    Attributes:
        kind: "check" for a grammar, "render" for a conversation, "judge" for a reranker's prompt, "encode"
            for text, "image" for the bytes of a file, or "data_url".
        field: the field of the request that errors name.
        arguments: JSON object with the fields of StructuredOutputs, the template with its special tokens and
            the arguments of rendered_chat or judging_text, or an image's mm_processor_kwargs; or a list of
            the arguments of Tokenizer.encode.
        seconds: the processor time that it may take.
        source: an image's.
    """

    kind: str
    field: str
    arguments: str
    seconds: float
    source: bytes = b""


class Done(WireMessage):
    """The result: the rendered conversation, or the reason for a rejection. Also sent when a worker is ready.
    An image's parts are sent before, as Pictures.

    Attributes:
        seconds: processor time of the job.
        text: the conversation's, of which token_ids are the tokens.
        too_long: the attributes of a PromptTooLong.
    """

    token_ids: list[int] = []
    field: str = ""
    value: str = ""
    limit: str = ""
    seconds: float = 0.0
    text: str = ""
    too_long: tuple[int, int, bool] | None = None

    @classmethod
    def refused(cls, error: InvalidArgument) -> Done:
        value = error.value if isinstance(error.value, str) else ""
        too_long = error.counts if isinstance(error, PromptTooLong) else None
        return cls(field=error.field, value=value, limit=error.limit, too_long=too_long)

    def check(self) -> None:
        """Raises InvalidArgument if the job was rejected."""
        if self.too_long is not None:
            raise PromptTooLong(self.field, self.value, self.limit, *self.too_long)
        if self.limit:
            raise InvalidArgument(self.field, self.value, self.limit)


# --- frames ----------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()


def frame(message: WireMessage) -> bytearray:
    """Encodes a message for the socket.

    Raises:
        TooLarge: the other side would reject it and close the connection.
    """
    buffer = bytearray(4)
    _encoder.encode_into(message, buffer, 4)
    size = len(buffer) - 4
    if size > MAX_FRAME:
        raise TooLarge(size, MAX_FRAME)
    buffer[:4] = size.to_bytes(4, "little")
    return buffer


class Frames[T]:
    """Decodes bytes into messages of a kind, such as Order or Report."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._rest = bytearray()

    def take(self, data: bytes) -> list[T]:
        """Returns the messages that these bytes complete.

        Raises:
            Garbled: the bytes are invalid.
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
                raise Garbled(f"invalid message: {error}") from None
        del rest[:at]
        return messages


# --- requests and errors ---------------------------------------------------------------------------


def add_order(requests: tuple[Request, ...]) -> Add:
    """Encodes a prompt's requests, without masks and text. Common parts are sent once."""
    first = requests[0]
    images = first.images
    return Add(
        **{name: getattr(first, name) for name in EQUAL_FIELDS},
        params=_params_text(first.params),
        samples=[PromptSample(request.request_id, request.sample_index) for request in requests],
        priority=max(-(2**63), min(first.priority, 2**63 - 1)),  # the range of msgpack integers
        beams="" if first.beams is None else json.dumps(dataclasses.asdict(first.beams)),
        pictures=None if images is None else Pictures([part.key for part in images.parts], images.positions),
    )


def picture_orders(requests: tuple[Request, ...]) -> Iterator[Picture]:
    """The parts of a prompt's images, which are sent before it."""
    images = requests[0].images
    parts = {} if images is None else {part.key: part for part in images.parts}
    for part in parts.values():
        yield picture_of(part)


def picture_of(part: ImagePart) -> Picture:
    arrays = part.pixels.tobytes(), part.places.tobytes()
    return Picture(part.key, *arrays, len(part.pixels), part.rows, part.grid)


def part_of(picture: Picture) -> ImagePart:
    import numpy as np  # imported here, since only processes with images need it

    pixels = np.frombuffer(picture.pixels, np.float32).reshape(picture.patches, -1)
    places = np.frombuffer(picture.places, np.int32).reshape(picture.patches, -1)
    return ImagePart(picture.key, pixels, places, picture.rows, picture.grid)


class Gallery:
    """Parts of images that were received before their prompt."""

    def __init__(self) -> None:
        self._parts: dict[int, Picture] = {}

    def keep(self, part: Picture) -> None:
        self._parts[part.key] = part

    def give(self, pictures: Pictures) -> None:
        """Adds the parts to the prompt that they were sent for."""
        pictures.parts = [self._parts[key] for key in pictures.keys]
        self._parts.clear()


def images_of(pictures: Pictures) -> PromptImages:
    parts = {part.key: part_of(part) for part in pictures.parts}
    return PromptImages(tuple(parts[key] for key in pictures.keys), pictures.positions)


def has_masks(order: Add) -> bool:
    """Whether `requests_of` creates masks, which may be slow. May be true without need."""
    return '"structured_outputs"' in order.params


def requests_of(order: Add, tokenizer: Tokenizer | None, make: MakeMasks | None = None) -> list[Request]:
    """Decodes the requests, with new masks.

    Args:
        make: makes the masks; by default make_masks.

    Raises:
        InvalidArgument: a mask cannot be created here, although the server could.
    """
    params = SamplingParams(**json.loads(order.params))
    first, others = params_of_samples(params)
    beams = BeamSearchParams(**json.loads(order.beams)) if order.beams else None
    masks: Sequence[TokenMask | None] = [None] * len(order.samples)
    images = None if order.pictures is None else images_of(order.pictures)
    if params.masks and tokenizer is not None:
        from jengine.spi import make_masks  # imported here, since only structured outputs need llguidance

        masks = (make or make_masks)(params, tokenizer, len(order.samples))
        masks = bound_thinking(masks, params, tokenizer, order.prompt_token_ids)
    return [
        Request(
            **{name: getattr(order, name) for name in EQUAL_FIELDS},
            request_id=sample.request_id,
            params=others if i else first,
            sample_index=sample.sample_index,
            mask=masks[i],
            priority=order.priority,
            beams=beams,
            images=images,
        )
        for i, sample in enumerate(order.samples)
    ]


def _params_text(params: SamplingParams) -> str:
    """The parameters that differ from the defaults."""
    fields = {name: value for name in _FIELDS if (value := getattr(params, name)) != getattr(_DEFAULTS, name)}
    if params.structured_outputs is not None:
        fields["structured_outputs"] = dataclasses.asdict(params.structured_outputs)  # type: ignore[arg-type]
    return json.dumps(fields)


def failed(error: BaseException) -> Failed:
    """Encodes an error for the server."""
    if isinstance(error, InvalidArgument):
        arguments = [error.field, error.value, error.limit]
        return Failed("InvalidArgument", json.dumps(arguments, default=str))
    text = str(error) if isinstance(error, JengineError) else f"{type(error).__name__}: {error}"
    return Failed(type(error).__name__, json.dumps([text]))


def error_of(message: Failed, otherwise: type[JengineError] = EngineDead) -> JengineError:
    """Decodes the error if it is one that callers cause."""
    error: JengineError = _ERRORS.get(message.kind, otherwise)(*json.loads(message.arguments))
    return error
