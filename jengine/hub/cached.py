"""Models in huggingface_hub's cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jengine.base.errors import ModelError
from jengine.base.gguf_file import SUFFIX
from jengine.base.model_files import read_object
from jengine.hub.files import DEFAULT_QUANTIZATION, HubName, quantization_of

WEIGHTS = ".safetensors", ".bin"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A revision of a model in the cache, or a GGUF file in it.

    Attributes:
        quantization: of a GGUF file; None: a folder.
        path: the folder, or the GGUF file.
        bytes: on disk.
    """

    quantization: str | None
    path: Path
    bytes: int


def is_cached(name: HubName, revision: str | None = None) -> bool:
    """Whether an engine of this model needs to download nothing."""
    formats = {name.quantization or DEFAULT_QUANTIZATION, name.quantization}
    wanted = {format and format.upper() for format in formats}
    return any(
        model.quantization in wanted and _complete(model.path) for model in _models(name.repo, revision)
    )


def bytes_on_disk(model: str, revision: str | None = None) -> int:
    """Bytes of a model's files, of a folder, a GGUF file, or a model in the cache; 0 if it is not there."""
    path = Path(model).expanduser()
    with contextlib.suppress(OSError):
        if path.is_file():
            return path.stat().st_size
        if path.is_dir():
            return sum(
                file.stat().st_size for file in path.iterdir() if file.name.endswith((SUFFIX, *WEIGHTS))
            )
        if (name := HubName.of(model)) is not None:
            wanted = name.quantization and name.quantization.upper()
            models = [m for m in _models(name.repo, revision) if wanted in (None, m.quantization)]
            return max((model.bytes for model in models), default=0)
    return 0


def _models(repository: str, revision: str | None) -> Iterator[CachedModel]:
    """The models of a repository in the cache.

    Args:
        revision: a branch, a tag, or the beginning of a commit; None: main.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:  # nothing was downloaded yet
        return
    wanted = revision or "main"
    models = [repo for repo in repositories if (repo.repo_type, repo.repo_id) == ("model", repository)]
    for cached in (cached for repo in models for cached in repo.revisions):
        if wanted not in cached.refs and not cached.commit_hash.startswith(wanted):
            continue
        folder = Path(cached.snapshot_path)
        for file in cached.files:
            quantization = quantization_of(file.file_name) if file.file_name.endswith(SUFFIX) else None
            if quantization is not None and not file.file_name.startswith("mmproj"):
                yield CachedModel(quantization, Path(file.file_path), file.size_on_disk)
        weights = [file for file in cached.files if file.file_name.endswith(WEIGHTS)]
        if (
            any(Path(file.file_path).parent == folder for file in weights)
            and (folder / "config.json").exists()
        ):
            yield CachedModel(None, folder, cached.size_on_disk)


def _complete(path: Path) -> bool:
    """Whether all files are there that an index of weights lists."""
    for index in path.glob("*.index.json") if path.is_dir() else ():
        with contextlib.suppress(ModelError, OSError, ValueError, TypeError, AttributeError):
            listed = set(read_object(index).get("weight_map", {}).values())
            if not all((path / file).exists() for file in listed):
                return False
    return True
