"""Tensors of the open inference protocol, as Python lists and back."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from jengine import InvalidArgument
from serving.generated.inference import grpc_service_pb2 as pb

# By datatype: where `contents` has its elements, and how raw contents have them.
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


def read_inputs(request: pb.ModelInferRequest) -> dict[str, list[Any]]:
    """The request's tensors, flat; BYTES as text.

    Raises:
        InvalidArgument: naming the tensor.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidArgument("raw_input_contents", len(raw), f"must be as many as inputs: {len(request.inputs)}, or none")
    out: dict[str, list[Any]] = {}
    for i, tensor in enumerate(request.inputs):
        name = f"inputs[{i}]"
        if tensor.name in out:
            raise InvalidArgument(f"{name}.name", tensor.name, "occurs twice")
        if tensor.datatype not in KINDS:
            raise InvalidArgument(f"{name}.datatype", tensor.datatype, f"must be one of {', '.join(KINDS)}")
        field, form = KINDS[tensor.datatype]
        elements = _unpack(name, raw[i], form) if raw else list(getattr(tensor.contents, field))
        if any(size < 0 for size in tensor.shape) or math.prod(tensor.shape) != len(elements):
            raise InvalidArgument(f"{name}.shape", list(tensor.shape), f"there are {len(elements)} elements")
        out[tensor.name] = [_text(name, element) for element in elements] if tensor.datatype == "BYTES" else elements
    return out


def write_texts(response: pb.ModelInferResponse, name: str, texts: Sequence[str], raw: bool) -> None:
    """Add a BYTES tensor [len(texts)] to the response."""
    tensor = response.outputs.add(name=name, datatype="BYTES", shape=[len(texts)])
    elements = [text.encode() for text in texts]
    if raw:
        response.raw_output_contents.append(b"".join(struct.pack("<I", len(element)) + element for element in elements))
    else:
        tensor.contents.bytes_contents.extend(elements)


def _unpack(name: str, raw: bytes, form: str | None) -> list[Any]:
    if form is not None:
        if len(raw) % struct.calcsize(form):
            raise InvalidArgument(name, f"{len(raw)} bytes", f"an element has {struct.calcsize(form)}")
        return [element for (element,) in struct.iter_unpack(f"<{form}", raw)]
    elements, at = [], 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if end > len(raw):
            raise InvalidArgument(name, f"{len(raw)} bytes", "an element is cut off: each is its length in four bytes, then as many bytes")
        elements.append(raw[at + 4 : end])
        at = end
    return elements


def _text(name: str, element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(name, f"{len(element)} bytes", "must be UTF-8 text") from None
