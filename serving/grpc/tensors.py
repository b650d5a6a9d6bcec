"""Reads requests of the open inference protocol, and writes its tensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from jengine import InvalidArgument, SamplingParams, check_entries
from jengine.serving.generated.inference import grpc_service_pb2 as pb
from jengine.serving.grpc.conversions import DEFAULTS, from_params

# By datatype: the field of `contents` with the elements, and their format in raw contents.
KINDS = {
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
    "BYTES": ("bytes_contents", None),
}


# sampling parameters given as tensors of any size
LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
OUTPUTS = ("text_output", "finish_reason")
WITHOUT_EFFECT = ("triton_enable_empty_final_response",)  # the last response is always marked
LEVEL = ("priority", "timeout", "cache_salt", "ttft_ms", "tpot_ms")
# names of inputs and parameters
KNOWN = {"text_input", "sampling_parameters", *LEVEL, *DEFAULTS, *WITHOUT_EFFECT}
NOT_KNOWN = "there is no such input or parameter"
MAX_RANK = 8  # maximum number of dimensions, since their product is computed
MAX_TEXTS = 1000  # maximum texts in a tensor: more than any parameter allows


class TensorRequest(NamedTuple):
    """A parsed request."""

    text: str
    params: SamplingParams
    priority: int
    timeout: float | None  # seconds
    cache_salt: Any  # not validated yet
    ttft_ms: Any  # not validated yet
    tpot_ms: Any
    bytes: int  # size of the request


def read_request(request: pb.ModelInferRequest, default: SamplingParams | None = None) -> TensorRequest:
    """Reads a request.

    Sampling parameters are request parameters or input tensors with their names, or fields of
    sampling_parameters, a JSON object. Others are taken from `default` or SamplingParams().

    Raises:
        InvalidArgument: naming the parameter or tensor.
    """
    if len(request.outputs) > len(OUTPUTS):
        raise InvalidArgument("outputs", len(request.outputs), f"at most one each of {', '.join(OUTPUTS)}")
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise InvalidArgument("outputs", output.name, f"must be among {', '.join(OUTPUTS)}")
    given: dict[str, Any] = {}
    for name, elements in read_inputs(request).items():
        given[name] = elements if name in LISTS else elements[0]
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        _check_known(name, kind)
        if name in given or kind is None:
            raise InvalidArgument(
                name, kind, "has no value" if kind is None else "is both a tensor and a parameter"
            )
        if name not in WITHOUT_EFFECT:
            given[name] = getattr(parameter, kind)
    text = given.pop("text_input", None)
    if not isinstance(text, str):
        raise InvalidArgument("text_input", text, "must be given, as a BYTES tensor of one element")
    level = {name: given.pop(name, None) for name in LEVEL}
    params = _params(given, SamplingParams() if default is None else default)
    priority, timeout = level["priority"], level.pop("timeout")
    level |= {
        "priority": 0 if priority is None else priority,
        "timeout": None if timeout is None else _seconds(timeout),
    }
    return TensorRequest(text=text, params=params, bytes=request.ByteSize(), **level)


def _params(given: dict[str, Any], default: SamplingParams) -> SamplingParams:
    if "sampling_parameters" in given:
        given |= _json_object("sampling_parameters", given.pop("sampling_parameters"), given)
    for name, value in given.items():
        if name not in DEFAULTS:
            raise InvalidArgument(name, value, NOT_KNOWN)
    params = default.clone(**given)
    from_params(params)  # JSON can contain numbers and texts that neither protobuf nor the engine supports
    return params


def _check_known(name: str, value: object) -> None:
    if name not in KNOWN:
        raise InvalidArgument(name, value, NOT_KNOWN)


def _json_object(name: str, text: object, given: dict[str, Any]) -> dict[str, Any]:
    try:
        fields = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InvalidArgument(name, text, "must be the text of a JSON object")
    if twice := given.keys() & fields.keys():
        raise InvalidArgument(name, sorted(twice), "are parameters or tensors as well")
    return fields


def _seconds(microseconds: object) -> float:
    if type(microseconds) is not int:
        raise InvalidArgument("timeout", microseconds, "must be a whole number of microseconds")
    return microseconds / 1e6


def read_inputs(request: pb.ModelInferRequest) -> dict[str, list[Any]]:
    """The request's tensors as flat lists; BYTES as text.

    Raises:
        InvalidArgument: naming the tensor.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidArgument(
            "raw_input_contents", len(raw), f"must be as many as inputs: {len(request.inputs)}, or none"
        )
    out: dict[str, list[Any]] = {}
    for i, tensor in enumerate(request.inputs):
        name = f"inputs[{i}]"
        if tensor.name in out:
            raise InvalidArgument(f"{name}.name", tensor.name, "occurs twice")
        _check_known(tensor.name, tensor.datatype)
        if tensor.datatype not in KINDS:
            raise InvalidArgument(f"{name}.datatype", tensor.datatype, f"must be one of {', '.join(KINDS)}")
        field, form = KINDS[tensor.datatype]
        if len(tensor.shape) > MAX_RANK:
            raise InvalidArgument(f"{name}.shape", f"{len(tensor.shape)} sizes", f"at most {MAX_RANK}")
        count = math.prod(tensor.shape)
        held = _count(name, raw[i], form) if raw else len(getattr(tensor.contents, field))
        if any(size < 0 for size in tensor.shape) or count != held:
            raise InvalidArgument(
                f"{name}.shape",
                list(tensor.shape),
                f"there are {held} elements{' or more' if held > MAX_TEXTS else ''}",
            )
        if tensor.name not in LISTS and count != 1:
            raise InvalidArgument(tensor.name, f"{count} elements", "must have one")
        check_entries(tensor.name, count)  # before they are read
        elements = _unpack(raw[i], form) if raw else list(getattr(tensor.contents, field))
        out[tensor.name] = (
            [_text(name, element) for element in elements] if tensor.datatype == "BYTES" else elements
        )
    return out


def write_texts(response: pb.ModelInferResponse, name: str, texts: Sequence[str], raw: bool) -> None:
    """Adds a BYTES tensor [len(texts)] to the response."""
    tensor = response.outputs.add(name=name, datatype="BYTES", shape=[len(texts)])
    elements = [text.encode() for text in texts]
    if raw:
        response.raw_output_contents.append(
            b"".join(struct.pack("<I", len(element)) + element for element in elements)
        )
    else:
        tensor.contents.bytes_contents.extend(elements)


def _count(name: str, raw: bytes, form: str | None) -> int:
    """Number of elements in a tensor. Texts are counted up to MAX_TEXTS + 1."""
    if form is not None:
        if len(raw) % struct.calcsize(form):
            raise InvalidArgument(name, f"{len(raw)} bytes", f"an element has {struct.calcsize(form)}")
        return len(raw) // struct.calcsize(form)
    count = at = 0
    while at < len(raw) and count <= MAX_TEXTS:
        at += 4 + int.from_bytes(raw[at : at + 4], "little")
        if at > len(raw):
            raise InvalidArgument(
                name,
                f"{len(raw)} bytes",
                "an element is truncated: each has a length of four bytes, followed by its bytes",
            )
        count += 1
    return count


def _unpack(raw: bytes, form: str | None) -> list[Any]:
    if form is not None:
        return [element for (element,) in struct.iter_unpack(f"<{form}", raw)]
    elements, at = [], 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        elements.append(raw[at + 4 : end])
        at = end
    return elements


def _text(name: str, element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(name, f"{len(element)} bytes", "must be UTF-8 text") from None
