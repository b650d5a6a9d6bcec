"""Reads safetensors files through a memory map: tensors are views of the file, read on access.

The format is 8 bytes with the header's length in little-endian order, a JSON header, and the tensors' bytes.
The numpy part of the safetensors package does not support bfloat16 and copies every tensor.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jengine.base.errors import ModelError
from jengine.base.model_files import as_object, open_regular, parse_json
from jengine.checkpoints.stored import Tensor

DTYPES = {
    "F64": np.dtype("float64"), "F32": np.dtype("float32"), "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
NUMBERS = {  # of quantized tensors
    "I8": np.dtype("int8"), "U8": np.dtype("uint8"), "I32": np.dtype("int32"), "I64": np.dtype("int64"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}  # fmt: skip
READABLE = {**DTYPES, **NUMBERS}
MAX_HEADER = 100_000_000  # bytes, the format's own limit
MAX_DIMENSIONS = 8
MAX_SIZE = 2**63 - 1  # of an axis, and of an offset


def read_file(file: Path, skipped: tuple[str, ...]) -> dict[str, Tensor]:
    """All tensors of a file by name, except those with these suffixes.

    Raises:
        ModelError: it is missing, truncated or corrupt.
    """
    try:
        with open_regular(file) as opened:
            data = np.memmap(opened, np.uint8, mode="r")
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelError(f"cannot be mapped into memory: {error}", file=file) from None
    return parse(data, file, skipped)


def parse(data: np.ndarray, file: Path, skipped: tuple[str, ...]) -> dict[str, Tensor]:
    """Reads tensors from the bytes of a file, uint8. file: in errors."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if data.size < 8 or length > MAX_HEADER:
        raise ModelError("the header is corrupt: this is not a safetensors file", file=file)
    if 8 + length > data.size:
        raise ModelError(
            f"is truncated: the header needs {8 + length} bytes, the file has {data.size}", file=file
        )
    try:
        header = as_object(parse_json(data[8 : 8 + length].tobytes(), file), file)
    except ModelError as wrong:
        raise ModelError(f"the header is corrupt: it {wrong.reason}", file=file) from None
    entries = {
        name: entry for name, entry in header.items() if name != "__metadata__" and not name.endswith(skipped)
    }
    body = data[8 + length :]
    return {name: Tensor(file, _view(body, entry, file, name)) for name, entry in entries.items()}


def _view(body: np.ndarray, entry: Any, file: Path, name: str) -> np.ndarray:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not all(type(size) is int and 0 <= size <= MAX_SIZE for size in (*shape, begin, end)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ModelError(
            "the header is corrupt: it lacks dtype, shape or data_offsets, or they have the wrong type or"
            " value",
            file=file,
            tensor=name,
        ) from None
    if len(shape) > MAX_DIMENSIONS:
        raise ModelError(f"has {len(shape)} dimensions; at most {MAX_DIMENSIONS}", file=file, tensor=name)
    if not isinstance(kind, str) or kind not in READABLE:
        raise ModelError(f"dtype {kind} is not supported; {', '.join(DTYPES)} are", file=file, tensor=name)
    size = math.prod(shape) * READABLE[kind].itemsize
    if end - begin != size:
        raise ModelError(
            f"the header is corrupt: {kind}{list(shape)} does not fill bytes {begin} to {end}",
            file=file,
            tensor=name,
        )
    if end > body.size:
        raise ModelError(
            f"is truncated: the tensors reach to byte {end}, the file to {body.size}", file=file, tensor=name
        )
    array: np.ndarray = body[begin:end].view(READABLE[kind]).reshape(shape)
    return array
