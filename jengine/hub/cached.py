"""Models in huggingface_hub's cache."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jengine.base.errors import ModelError
from jengine.base.gguf_file import SUFFIX
from jengine.base.model_files import read_object
from jengine.hub.files import DEFAULT_QUANTIZATION, HubName, quantization_of

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo

WEIGHTS = ".safetensors", ".bin"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A revision of a model in the cache, or a GGUF file in it.

    Attributes:
        commit: of the revision.
        refs: branches and tags that point to it.
        path: the folder, or the GGUF file.
        bytes: on disk.
        used: time of the last access, in seconds since the epoch.
        complete: whether all files that it lists are there.
    """

    name: HubName
    commit: str
    refs: tuple[str, ...]
    path: Path
    bytes: int
    used: float
    complete: bool = True


def cached_models() -> list[CachedModel]:
    """All models in the cache that jengine can try to load, by name."""
    return sorted(
        (found for repo in _repositories() for found in _models(repo)), key=lambda found: str(found.name)
    )


def matching(name: HubName, revision: str | None = None) -> list[CachedModel]:
    """The cached models of this name; one without a quantization has all of its repository.

    Args:
        revision: a branch, a tag, or the beginning of a commit; None: all.
    """
    return [
        model
        for model in cached_models()
        if model.name.repo == name.repo
        and (name.quantization is None or model.name.quantization == name.quantization.upper())
        and (revision is None or revision in model.refs or model.commit.startswith(revision))
    ]


def is_cached(name: HubName, revision: str | None = None) -> bool:
    """Whether an engine of this model needs to download nothing."""
    wanted = (name.quantization or DEFAULT_QUANTIZATION).upper()
    return any(
        model.complete
        and model.name.quantization in ([None, wanted] if name.quantization is None else [wanted])
        for model in matching(name, revision or "main")
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
            return max((found.bytes for found in matching(name, revision or "main")), default=0)
    return 0


def remove(models: list[CachedModel]) -> int:
    """Deletes models from the cache. Files that others share stay. Returns the bytes that are free now.

    Raises:
        OSError: a file cannot be deleted.
    """
    freed = 0
    for model in models:
        repo = next((repo for repo in _repositories() if repo.repo_id == model.name.repo), None)
        revision = (
            next((one for one in repo.revisions if one.commit_hash == model.commit), None) if repo else None
        )
        if repo is None or revision is None:  # another process has removed it
            continue
        freed += _remove_file(model, repo) if _has_others(model, revision) else _remove_revision(model)
    return freed


def _repositories() -> list[CachedRepoInfo]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with contextlib.suppress(CacheNotFound):  # nothing was downloaded yet
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    return []


def _models(repo: CachedRepoInfo) -> list[CachedModel]:
    out = []
    for revision in repo.revisions:
        refs, folder = tuple(sorted(revision.refs)), Path(revision.snapshot_path)
        about = repo.repo_id, revision.commit_hash, refs
        for file in revision.files:
            quantization = quantization_of(file.file_name) if file.file_name.endswith(SUFFIX) else None
            if quantization is not None and not file.file_name.startswith("mmproj"):
                out.append(
                    _model(
                        *about, Path(file.file_path), file.size_on_disk, file.blob_last_accessed, quantization
                    )
                )
        whole = any(
            file.file_name.endswith(WEIGHTS) and Path(file.file_path).parent == folder
            for file in revision.files
        )
        if whole and (folder / "config.json").exists():
            used = max(file.blob_last_accessed for file in revision.files)
            out.append(_model(*about, folder, revision.size_on_disk, used))
    return out


def _model(
    repo: str,
    commit: str,
    refs: tuple[str, ...],
    path: Path,
    size: int,
    used: float,
    quantization: str | None = None,
) -> CachedModel:
    return CachedModel(
        HubName(repo, quantization), commit, refs, path, size, min(used, time.time()), _complete(path)
    )


def _complete(path: Path) -> bool:
    """Whether all files are there that an index of weights lists."""
    for index in path.glob("*.index.json") if path.is_dir() else ():
        with contextlib.suppress(ModelError, OSError, ValueError, TypeError, AttributeError):
            listed = set(read_object(index).get("weight_map", {}).values())
            if not all((path / file).exists() for file in listed):
                return False
    return True


def _has_others(model: CachedModel, revision: CachedRevisionInfo) -> bool:
    """Whether the revision has other weights than this GGUF file."""
    return model.name.quantization is not None and any(
        file.file_name.endswith((SUFFIX, *WEIGHTS)) and Path(file.file_path) != model.path
        for file in revision.files
    )


def _remove_revision(model: CachedModel) -> int:
    from huggingface_hub import scan_cache_dir

    strategy = scan_cache_dir().delete_revisions(model.commit)
    strategy.execute()
    return int(strategy.expected_freed_size)


def _remove_file(model: CachedModel, repo: CachedRepoInfo) -> int:
    blob = model.path.resolve()
    shared = any(
        Path(file.blob_path) == blob and Path(file.file_path) != model.path
        for revision in repo.revisions
        for file in revision.files
    )
    model.path.unlink()
    if shared:
        return 0
    if blob != model.path:
        blob.unlink()
    return model.bytes
