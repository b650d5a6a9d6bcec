"""Reads PyTorch's .bin files without PyTorch, through a memory map, and without executing anything that they
reference.

A file is a zip archive (torch/serialization.py). data.pkl is a pickled dictionary of tensors. The bytes of
their storages are separate, uncompressed members. A pickle can call anything that it can import, so the
unpickler only allows the few names that tensors need.
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jengine.base.errors import ModelError
from jengine.base.model_files import open_regular
from jengine.checkpoints.stored import Tensor

STORAGES = {  # torch's classes
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool",
}  # fmt: skip
DTYPES = {name: np.dtype(dtype) for name, dtype in STORAGES.items()} | {
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16)
}
MAX_PICKLE = 100_000_000  # bytes; a tensor takes about 200
LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a member, before its name and extra field


def read_file(file: Path, skipped: tuple[str, ...]) -> dict[str, Tensor]:
    """All tensors of a file by name, except those with these suffixes.

    Raises:
        ModelError: it is missing, truncated or corrupt, contains other objects, or has PyTorch's format
            before 1.6.
    """
    try:
        with open_regular(file) as opened, zipfile.ZipFile(opened) as archive:
            data = np.memmap(opened, np.uint8, mode="r")
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if members["data.pkl"].file_size > MAX_PICKLE:
                raise ModelError(
                    f"data.pkl has {members['data.pkl'].file_size} bytes; at most {MAX_PICKLE} are read",
                    file=file,
                )
            pickled = archive.read(members["data.pkl"])
            order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
    except (zipfile.BadZipFile, KeyError, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        why = "files of PyTorch before 1.6 must be loaded and saved with a newer version"
        raise ModelError(f"is not a zip archive by PyTorch ({error}); {why}", file=file) from None
    if order.strip() != b"little":
        raise ModelError(f"byteorder {order!r} is not supported; little is", file=file)
    try:
        content = _Unpickler(BytesIO(pickled), file, data, members).load()
    except ModelError:
        raise
    except Exception as error:  # a corrupt pickle may raise anything
        raise ModelError(f"data.pkl is corrupt: {type(error).__name__}: {error}", file=file) from None
    if not isinstance(content, dict):
        raise ModelError(f"holds a {type(content).__name__}, not a dictionary of tensors", file=file)
    tensors = {name: value for name, value in content.items() if not str(name).endswith(skipped)}
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            raise ModelError(f"holds a {type(value).__name__} under {name!r}, not a tensor", file=file)
    return {name: Tensor(file, value) for name, value in tensors.items()}


class _Unpickler(pickle.Unpickler):
    """Reads tensors; members: those of the archive in `file`, of which `data` are the bytes."""

    def __init__(
        self, pickled: BytesIO, file: Path, data: np.ndarray, members: dict[str, zipfile.ZipInfo]
    ) -> None:
        super().__init__(pickled)
        self._file, self._data, self._members = file, data, members

    def find_class(self, module: str, name: str) -> Any:
        """The only names that a pickle may reference, and thus call."""
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        allowed = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
        }
        if (module, name) not in allowed:
            raise ModelError(f"names {module}.{name}; only tensors are read", file=self._file)
        return allowed[module, name]

    def persistent_load(self, saved: Any) -> np.ndarray:
        kind, dtype, key, _, count = saved
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise ModelError(f"references a {kind} that is not a storage", file=self._file)
        return self._storage(dtype, str(key), int(count))

    def _storage(self, dtype: np.dtype[Any], key: str, count: int) -> np.ndarray:
        info = self._members.get(f"data/{key}")
        if info is None:
            raise ModelError(f"has no storage {key}, which a tensor references", file=self._file)
        if info.compress_type != zipfile.ZIP_STORED:
            raise ModelError(f"storage {key} is compressed, which is not supported", file=self._file)
        header = self._data[info.header_offset : info.header_offset + LOCAL_HEADER.size].tobytes()
        *_, name, extra = LOCAL_HEADER.unpack(header)
        begin = info.header_offset + LOCAL_HEADER.size + name + extra
        size = count * dtype.itemsize
        if count < 0 or size > info.file_size or begin + size > self._data.size:
            raise ModelError(f"is truncated: storage {key} needs {size} bytes", file=self._file)
        storage: np.ndarray = self._data[begin : begin + size].view(dtype)
        return storage

    def _tensor(
        self, storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
    ) -> np.ndarray:
        """A view of a storage. Offset and strides are in elements."""
        shape, strides, offset = tuple(map(int, shape)), tuple(map(int, strides)), int(offset)
        if len(shape) != len(strides) or min((offset, *shape, *strides)) < 0:
            raise ModelError(
                f"a tensor of shape {list(shape)} has strides {list(strides)} and offset {offset}",
                file=self._file,
            )
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and last >= storage.size:
            raise ModelError(
                f"a tensor reaches to element {last} of a storage of {storage.size}", file=self._file
            )
        start = storage[min(offset, storage.size) :]
        return np.lib.stride_tricks.as_strided(
            start, shape, [stride * storage.itemsize for stride in strides], writeable=False
        )
