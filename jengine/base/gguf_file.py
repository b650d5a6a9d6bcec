"""GGUF files, as llama.cpp writes them: metadata by name, and tensors as views of the file.

The format is read here, since the package gguf makes an array for each word of a vocabulary, which takes
seconds. It converts the rarer number formats.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine.base.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

SUFFIX = ".gguf"
FEW_FILES = 2  # number of files kept open; configuration, tokenizer and weights are read one after the other
MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32  # bytes, unless the file says otherwise
STRING, ARRAY = 8, 9
# of a field, by its type
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MOST_DIMENSIONS = 8
# Of a tensor: llama.cpp's name, numbers in a block, and bytes of one.
KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as it lies in the file.

    Attributes:
        kind: the name of its number format, such as "Q4_0".
        shape: of the numbers; the file has the last axis first.
        data: F32 and F16 as numbers [*shape], other kinds as bytes [*shape[:-1], bytes of a row].
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray


class GgufFile:
    """An open file.

    Attributes: path; tensors: by name; architecture: llama.cpp's name of the family; start: the place of the
    first tensor's data.

    Raises:
        ModelError: it is truncated or not a GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._fields, self.tensors, self.start = _Reader(mapped).contents()
        except (ValueError, OverflowError, OSError, struct.error) as wrong:
            raise ModelError(f"is not a complete GGUF file: {wrong}", file=path) from None
        self.architecture = str(self["general.architecture"])

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def __getitem__(self, name: str) -> Any:
        """The value of a field: a number, a text, or a list of them.

        Raises:
            ModelError: the field is missing.
        """
        if name not in self._fields:
            raise ModelError(f"field {name} is missing", file=self.path)
        return self._fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(name, default)

    def names(self, prefix: str) -> list[str]:
        """Names of fields with this prefix, without it."""
        return [name.removeprefix(prefix) for name in self._fields if name.startswith(prefix)]

    def floats(self, name: str) -> np.ndarray:
        """A tensor as float32."""
        import numpy as np

        tensor = self.tensors[name]
        return np.asarray(dequantized(tensor.data, tensor.kind), np.float32)


def dequantized(data: np.ndarray, kind: str) -> np.ndarray:
    """Rows of blocks, or numbers, as float32."""
    import numpy as np

    if kind in ("F32", "F16"):
        return data.astype(np.float32)
    if kind == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind == "Q8_0":
        blocks = data.reshape(*data.shape[:-1], -1, 34)
        scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
        return (blocks[..., 2:].view(np.int8) * scale).reshape(*data.shape[:-1], -1)
    from gguf import GGMLQuantizationType, dequantize  # slow to import

    return np.asarray(dequantize(data, GGMLQuantizationType[kind]), np.float32)


class _Reader:
    """Reads a file in order. Lengths that it gives are checked before anything of them is made."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def contents(self) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
        """All fields by name, all tensors by name, and the place of the first tensor's data.

        Raises:
            ValueError, struct.error, UnicodeDecodeError: this is not a GGUF file, or a part of one.
        """
        if self._data[:4] != MAGIC:
            raise ValueError("it begins with other bytes")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            big_endian = int.from_bytes(int(version).to_bytes(4, "big"), "little") in VERSIONS
            raise ValueError(
                "it is for big-endian machines" if big_endian else f"version {version} is not supported"
            )
        tensors, fields = self._number("Q"), self._number("Q")
        metadata = self._unique((self._text(), self._value(self._number("I"))) for _ in self._times(fields))
        described = self._unique((self._text(), self._described()) for _ in self._times(tensors))
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment={alignment!r} must be a power of two")
        start = -(-self._at // alignment) * alignment
        tensors_by_name = {name: self._tensor(name, start, *about) for name, about in described.items()}
        return metadata, tensors_by_name, start

    def _number(self, code: str) -> Any:
        [value] = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _text(self) -> str:
        end = self._number("Q") + self._at
        self._check(end)
        text = self._data[self._at : end].decode()
        self._at = end
        return text

    def _texts(self, count: int) -> list[str]:
        """A vocabulary: in one loop without calls, since it has hundreds of thousands."""
        data, at, length = self._data, self._at, struct.Struct("<Q").unpack_from
        out = []
        for _ in self._times(count):
            end = at + 8 + length(data, at)[0]
            self._check(end)
            out.append(data[at + 8 : end].decode())
            at = end
        self._at = at
        return out

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind != ARRAY:
            raise ValueError(f"a field has the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind == STRING:
            return self._texts(count)
        if kind not in NUMBERS:
            raise ValueError(f"a list has items of type {kind}")
        size = struct.calcsize(f"<{NUMBERS[kind]}")
        self._check(self._at + count * size)
        values = struct.unpack_from(f"<{count}{NUMBERS[kind]}", self._data, self._at)
        self._at += count * size
        return list(values)

    def _described(self) -> tuple[tuple[int, ...], int, int]:
        """A tensor's shape, last axis first, its kind, and its place."""
        axes = self._number("I")
        if axes > MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {axes} dimensions")
        return tuple(self._number("Q") for _ in range(axes)), self._number("I"), self._number("Q")

    def _tensor(self, name: str, start: int, axes: tuple[int, ...], number: int, offset: int) -> GgufTensor:
        import numpy as np

        if number not in KINDS:
            raise ValueError(f"tensor {name} has the unknown number format {number}")
        kind, block, size = KINDS[number]
        shape = tuple(reversed(axes)) or (1,)
        if shape[-1] % block:
            raise ValueError(
                f"tensor {name} has rows of {shape[-1]} numbers, no multiple of {kind}'s {block}"
            )
        stored = (*shape[:-1], shape[-1] // block * size)  # bytes of a row
        count = math.prod(stored)
        self._check(start + offset + count)
        data = np.frombuffer(self._data, np.uint8, count, start + offset).reshape(stored)
        return GgufTensor(
            name, kind, shape, data.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))
        )

    def _times(self, count: int) -> range:
        self._check(self._at + count)  # each takes at least a byte
        return range(count)

    def _check(self, end: int) -> None:
        if end > len(self._data):
            raise ValueError(f"it has {len(self._data):,} bytes, and needs at least {end:,}")

    @staticmethod
    def _unique(pairs: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in pairs:
            if name in out:
                raise ValueError(f"{name} is there twice")
            out[name] = value
        return out


def open_gguf(path: Path) -> GgufFile:
    """Opens a file, or returns the open one if the file has not changed.

    Raises:
        ModelError: it is missing, truncated or not a GGUF file.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", file=path) from None
    return _opened(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(FEW_FILES)
def _opened(path: Path, changed: int, size: int) -> GgufFile:
    return GgufFile(path)
