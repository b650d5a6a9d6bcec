"""GGUF files, as llama.cpp writes them: metadata by name, and tensors as views of the file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

SUFFIX = ".gguf"
FEW_FILES = 2  # number of files kept open; configuration, tokenizer and weights are read one after the other


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


class GgufFile:
    """Attributes: path; tensors: gguf's ReaderTensor by name."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader  # slow to import

        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, KeyError, IndexError, TypeError, OSError) as wrong:
            raise ModelError(f"is not a complete GGUF file: {wrong}", file=path) from None
        self._fields = reader.fields
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
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
        return self._fields[name].contents()

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self._fields:
            return default
        return self[name]

    def names(self, prefix: str) -> list[str]:
        """Names of fields with this prefix, without it."""
        return [name.removeprefix(prefix) for name in self._fields if name.startswith(prefix)]

    def floats(self, name: str) -> np.ndarray:
        """A tensor as float32."""
        import numpy as np
        from gguf import dequantize

        tensor = self.tensors[name]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)


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
