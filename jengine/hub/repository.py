"""A repository of the hub: what a model needs from it, known before anything large is downloaded."""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from jengine.base.errors import ModelError
from jengine.base.gguf_file import SUFFIX, GgufFile
from jengine.hub.download import download, hub_error
from jengine.hub.files import PROJECTORS, HubName, choose_gguf, gguf_patterns, model_files

HEADER_BYTES = 1 << 21, 1 << 24, 1 << 27  # of a GGUF file, to read until its header is complete
ABANDONED = 600.0  # seconds without a write after which no process writes a partial file any more


@dataclass(frozen=True, slots=True)
class Repository:
    """A model's files on the hub.

    Attributes:
        revision: a branch, tag or commit; None: the main branch.
        commit: that it points to.
        sizes: bytes of every file of the model.
        cached: those that are in the cache.
    """

    name: HubName
    revision: str | None
    commit: str
    sizes: dict[str, int]
    cached: frozenset[str]

    @classmethod
    def find(cls, name: HubName, revision: str | None = None) -> Repository:
        """Asks the hub.

        Raises:
            ModelError: the hub has no such model, refuses it, or cannot be reached; or the repository has no
                such files.
        """
        from huggingface_hub import HfApi, try_to_load_from_cache

        try:
            info = HfApi().model_info(name.repo, revision=revision, files_metadata=True)
        except Exception as error:
            raise hub_error(name.repo, revision, error) from error
        every = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        sizes = {file: every[file] for file in model_files(name, [*every])}
        commit = str(info.sha)
        cached = [
            file
            for file in sizes
            if isinstance(try_to_load_from_cache(name.repo, file, revision=commit), str)
        ]
        return cls(name, revision, commit, sizes, frozenset(cached))

    @property
    def to_download(self) -> int:
        """Bytes."""
        return sum(size for file, size in self.sizes.items() if file not in self.cached)

    def free(self) -> int:
        """Bytes that the cache's disk has left."""
        folder = _cache()
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def fetch(self, quiet: bool = False) -> Path:
        """Downloads what is missing, with progress bars on a terminal. Files that are complete stay if this
        is interrupted. Returns the folder.

        Raises:
            ModelError: see `download`.
        """
        _remove_abandoned(self.name.repo)
        files = [*map(_literal, self.sizes)]
        # by its branch, so that the cache knows where that points to
        return download(self.name.repo, self.revision, files, quiet=quiet)

    def header(self) -> Path:
        """A GGUF file with its header and its size, but without weights.

        Raises:
            ModelError: it is not a GGUF file, or the hub cannot be reached.
        """
        [(file, size)] = self.sizes.items()
        path = Path(_temporary().name) / self.commit / file.rpartition("/")[2]
        if path.exists():
            return path
        path.parent.mkdir(exist_ok=True)
        for most in HEADER_BYTES:
            beginning = self._beginning(file, min(most, size))
            path.write_bytes(beginning)
            with path.open("r+b") as sparse:
                sparse.truncate(size)
            complete = len(beginning) >= size
            try:
                if complete or GgufFile(path).start <= len(beginning):
                    return path
            except ModelError:  # it ends in the middle
                if most == HEADER_BYTES[-1]:
                    raise
        return path

    def _beginning(self, file: str, count: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        url = hf_hub_url(self.name.repo, file, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
        data = bytearray()
        try:
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
                hf_raise_for_status(response)
                for piece in response.iter_bytes():
                    data += piece
                    if len(data) >= count:
                        break  # the server may send all of it
        except Exception as error:
            raise hub_error(self.name.repo, self.commit, error) from error
        return bytes(data[:count])


def find_gguf(name: HubName, revision: str | None, *, weights: bool = True) -> Path:
    """The GGUF file of a quantization, downloaded unless it is cached.

    Args:
        weights: False: if it is not cached, a file with its header alone.

    Raises:
        ModelError: as Repository.find, or Repository.header.
    """
    assert name.quantization is not None
    if not weights:
        return _cached_gguf(name, revision) or Repository.find(name, revision).header()
    folder = download(name.repo, revision, gguf_patterns(name.quantization), *PROJECTORS)
    files = _ggufs(folder)
    if not files:
        Repository.find(name, revision)  # says what there is instead
    return folder / choose_gguf(name.repo, files, name.quantization)


def _cached_gguf(name: HubName, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name.repo, revision=revision, local_files_only=True))
        return folder / choose_gguf(name.repo, _ggufs(folder), name.quantization or "")
    except Exception:  # whatever is wrong with the cache, the file is not there
        return None


def _ggufs(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in folder.rglob(f"*{SUFFIX}")]


def _literal(file: str) -> str:
    """A pattern that only this name matches."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in file)


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def _remove_abandoned(repo: str) -> None:
    """Removes partial files of processes that were killed: huggingface_hub does not continue them."""
    folder = _cache() / f"models--{repo.replace('/', '--')}" / "blobs"
    for file in folder.glob("*.incomplete"):
        try:
            if time.time() - file.stat().st_mtime > ABANDONED:
                file.unlink()
        except OSError:  # another process has removed it
            continue


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="jengine-headers-")
