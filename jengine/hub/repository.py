"""A repository of the hub: what a model needs from it, known before anything large is downloaded; and
downloads into huggingface_hub's cache.
"""

from __future__ import annotations

import functools
import glob
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jengine.base.errors import ModelError
from jengine.base.gguf_file import SUFFIX, GgufFile
from jengine.base.progress import is_seen
from jengine.hub.files import OTHERS, PROJECTORS, HubName, choose_gguf, gguf_patterns, is_within, model_files

HEADER_BYTES = 1 << 21, 1 << 24, 1 << 27  # of a GGUF file, to read until its header is complete
COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_FILE = 2**63 - 1  # bytes
ABANDONED = 600.0  # seconds without a write after which no process writes a partial file any more


def download(
    model: str, revision: str | None, files: Sequence[str], *ignored: str, quiet: bool = False
) -> Path:
    """The local folder of a hub id, with the files that match these patterns. Those that are cached are not
    downloaded. Without a connection, the cached files are used if all of them are there.

    Args:
        quiet: no progress bars. They are shown on a terminal and in notebooks only.

    Raises:
        ModelError: the hub has no such model, refuses it, or cannot be reached.
    """
    from huggingface_hub import snapshot_download  # slow to import, and only needed for hub ids

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=[*files],
                ignore_patterns=[*ignored, *OTHERS],
                tqdm_class=_bar(model, quiet or not is_seen()),
            )
        )
    except Exception as error:  # errors of the network and the hub have no common base class
        raise hub_error(model, revision, error) from error


def hub_error(model: str, revision: str | None, error: Exception) -> ModelError:
    """What went wrong, for people."""
    from huggingface_hub import constants, errors

    # errors of the cache hide those that led to it
    first = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    cause = first if isinstance(first, Exception) else error
    text = f"there is no such folder, and the hub has no such model: {_first_line(error)}"
    token = "`hf auth login`, or HF_TOKEN"
    if isinstance(cause, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{model}"
        text = f"is gated: accept its conditions at {page}, and give a token of that account ({token})"
    elif isinstance(cause, errors.RepositoryNotFoundError):
        text = (
            "there is no such folder, and the hub has no such model; if it is private, give a token that may"
            f" read it ({token})"
        )
    elif isinstance(cause, errors.RevisionNotFoundError):
        text = f"the hub has no revision {revision!r} of this model"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        where = f"the hub at {constants.ENDPOINT} cannot be reached"
        text = f"is not completely in the cache, and {where}: {_first_line(first or error)}"
    return ModelError(text, file=model)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _bar(model: str, quiet: bool) -> type:
    """The class of huggingface_hub's progress bars: of several, only the one of bytes that are on disk."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)  # of huggingface_hub's own class
            hidden = quiet or options.get("unit") != "B" or options.get("desc") == "Downloading bytes"
            shown = {"desc": model, "bar_format": None, "leave": False}
            super().__init__(*args, **{**options, "disable": True} if hidden else {**options, **shown})

        def set_description(self, *_: Any, **__: Any) -> None:
            """The description stays the model's name."""

        set_description_str = set_description

    return Bar


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
        commit, every = str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()}
        _check(name.repo, commit, every)
        sizes = {file: every[file] for file in model_files(name, [*every])}
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
        files = [*map(glob.escape, self.sizes)]
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
        for header_bytes in HEADER_BYTES:
            beginning = self._beginning(file, min(header_bytes, size))
            try:
                path.write_bytes(beginning)
                with path.open("r+b") as sparse:
                    sparse.truncate(size)
            except OSError as wrong:
                path.unlink(missing_ok=True)
                reason = f"its header cannot be written to {path.parent}: {wrong.strerror}"
                raise ModelError(reason, file=self.name.repo) from None
            complete = len(beginning) >= size
            try:
                if complete or GgufFile(path).start <= len(beginning):
                    return path
            except ModelError:  # it ends in the middle
                if header_bytes == HEADER_BYTES[-1]:
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


def _check(repo: str, commit: str, sizes: Mapping[str, int]) -> None:
    """Checks what the hub says of a repository, before any of it becomes a part of a path.

    Raises:
        ModelError: it is no commit, or no file within the repository, or no size.
    """
    if COMMIT.fullmatch(commit) is None:
        raise ModelError(f"the hub names {commit!r} as its commit: must be 40 hexadecimal digits", file=repo)
    for file, size in sizes.items():
        if not is_within(file):
            raise ModelError(
                f"the hub names {file[:200]!r} as a file: must lie within the repository", file=repo
            )
        if type(size) is not int or not 0 <= size <= MAX_FILE:
            reason = f"the hub says that {file[:200]!r} has {size!r:.50} bytes: must be from 0 to {MAX_FILE}"
            raise ModelError(reason, file=repo)


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


def gguf_alone(name: HubName, revision: str | None) -> Path | None:
    """As `find_gguf` without weights, but None if a repository has other weights, or if the hub cannot be
    asked and nothing is cached.
    """
    try:
        repository = Repository.find(HubName(name.repo), revision)
    except ModelError:
        return _cached_gguf(name, revision)
    alone = all(file.endswith(SUFFIX) for file in repository.sizes)
    return (_cached_gguf(name, revision) or repository.header()) if alone else None


def _cached_gguf(name: HubName, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name.repo, revision=revision, local_files_only=True))
        return folder / choose_gguf(name.repo, _ggufs(folder), name.quantization or "")
    except Exception:  # whatever is wrong with the cache, the file is not there
        return None


def _ggufs(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in folder.rglob(f"*{SUFFIX}")]


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
