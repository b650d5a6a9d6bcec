"""A checkpoint's tensors, from a single file or from shards listed in an index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jengine.base.errors import ModelError
from jengine.base.model_files import read_object
from jengine.checkpoints import pickled, safetensors
from jengine.checkpoints.in_memory import CONSTANTS, Tensors
from jengine.checkpoints.stored import Tensor
from jengine.hub.files import is_within

Reader = Callable[[Path, tuple[str, ...]], dict[str, Tensor]]
FORMATS: dict[str, Reader] = {
    "model.safetensors": safetensors.read_file,
    "pytorch_model.bin": pickled.read_file,
}  # the first one is preferred


def found_tensors(path: Path, tensors: Tensors | None) -> dict[str, Tensor]:
    """All tensors of a folder by name, without constants, or those given in their place.

    Raises:
        ModelError: a file is missing, truncated or corrupt.
    """
    if tensors is not None:
        return dict(tensors)
    for name, read in FORMATS.items():
        if (path / name).exists():
            return read(path / name, CONSTANTS)
        if (index := path / f"{name}.index.json").exists():
            return _read_shards(index, read)
    raise ModelError(
        f"has neither {' nor '.join(FORMATS)}, nor an index of such files; other formats are not read",
        file=path,
    )


def _read_shards(index: Path, read: Reader) -> dict[str, Tensor]:
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelError("weight_map is missing or does not map tensors to files", file=index)
    if outside := next((name for name in places.values() if not is_within(name)), None):
        raise ModelError(f"weight_map names {outside!r}, which is not a file of the folder", file=index)
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        tensors |= read(index.parent / name, CONSTANTS)
    for tensor, name in places.items():
        if tensor.endswith(CONSTANTS):
            continue
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise ModelError(
                f"is missing, but {index.name} lists it", file=index.parent / name, tensor=tensor
            )
    return tensors
