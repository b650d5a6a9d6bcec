"""PyTorch's .bin files, written without PyTorch."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path


def archive(file: Path, content: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(file, "w") as made:
        for name, data in {"data.pkl": content, **members}.items():
            made.writestr(f"archive/{name}", data)
    return file


def rebuilt(
    key: str = "0",
    count: int = 4,
    offset: int = 0,
    shape: Sequence[int] = (4,),
    strides: Sequence[int] = (1,),
    kind: str = "Float",
) -> bytes:
    """A tensor in a pickle. kind: of its storage, Float, Half or BFloat16."""

    def numbers(values: Sequence[int]) -> bytes:
        return b"(" + b"".join(b"I%d\n" % value for value in values) + b"t"

    storage = b"(Vstorage\nctorch\n%sStorage\nV%s\nVcpu\nI%d\ntQ" % (kind.encode(), key.encode(), count)
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"I%d\n" % offset
        + numbers(shape)
        + numbers(strides)
        + b"I00\n)tR"
    )


def dictionary(**values: bytes) -> bytes:
    return (
        b"\x80\x02}" + b"".join(b"V%s\n%ss" % (name.encode(), value) for name, value in values.items()) + b"."
    )
