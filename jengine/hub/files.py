"""Which files of a repository a model needs, and which models are in huggingface_hub's cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from jengine.base.errors import ModelError
from jengine.base.gguf_file import SUFFIX
from jengine.base.model_files import read_object

HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]  # weights, configuration, tokenizer
WITHOUT_WEIGHTS = HUB_FILES[1:]
TOKENIZER_FILES = [*WITHOUT_WEIGHTS]
BIN_FILES = ["pytorch_model*.bin"]  # if the hub has no safetensors
MODULES = ("Pooling", "Normalize", "LogitScore")  # of sentence-transformers, in folders of their own
IN_FOLDERS = ["additional_chat_templates/*.jinja", *(f"*_{module}/config.json" for module in MODULES)]
OTHERS = ["consolidated*", "*/consolidated*"]  # the same weights in other layouts
PROJECTORS = ["mmproj*", "*/mmproj*"]  # encoders of images, beside a model's GGUF file
DEFAULT_QUANTIZATION = "Q4_K_M"  # of a repository without other weights
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?", re.ASCII)
# the end of a GGUF file's name, such as Q4_K_M, UD-Q4_K_XL, IQ3_XXS or BF16
_QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|B?F\d+|MXFP4(?:_\w+)?))$", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}$")  # of a model in several files
WEIGHTS = ".safetensors", ".bin"


class HubName(NamedTuple):
    """A model of the hub: `owner/name`, or `owner/name:Q4_K_M`, a GGUF file of that quantization."""

    repo: str
    quantization: str | None = None

    @classmethod
    def of(cls, text: str) -> HubName | None:
        """None if the text has another form."""
        match = _NAME.fullmatch(text)
        return None if match is None else cls(*match.groups())

    def __str__(self) -> str:
        return self.repo if self.quantization is None else f"{self.repo}:{self.quantization}"


def hub_name(model: str) -> HubName:
    """The hub's name of a model that is not here. Raises ModelError for a path, and what is no hub id."""
    local = model.startswith(("/", "./", "../", "~"))
    name = HubName.of(model)
    if local or name is None:
        kind = "file" if model.endswith(SUFFIX) else "folder"
        hint = "; a hub id is owner/name, such as Qwen/Qwen3-0.6B, or owner/name:Q4_K_M for a GGUF file"
        raise ModelError(f"there is no such {kind}{'' if local else hint}", file=Path(model).expanduser())
    return name


def check_model(model: str) -> None:
    """Raises ModelError if there is no such file or folder, and the text is no hub id. Reads no model."""
    if model != "demo" and not local_path(model).exists():
        hub_name(model)


def local_path(text: str) -> Path:
    """What a text names, whether it is there or not. Raises ModelError if it can name nothing."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as wrong:  # a long name, a NUL, an unknown user
        raise ModelError(f"cannot be read: {wrong}", file=text) from None
    return path


def is_within(file: str) -> bool:
    """Whether the name of a repository's file stays within its folder."""
    return (
        file.isprintable()
        and "\\" not in file
        and all(part not in ("", ".", "..") for part in file.split("/"))
    )


def quantization_of(file: str) -> str | None:
    """The quantization in the name of a GGUF file, in capitals: of Qwen3-0.6B-Q4_K_M.gguf, Q4_K_M."""
    match = _QUANTIZATION.search(_PART.sub("", file.rpartition("/")[2].removesuffix(SUFFIX)))
    return None if match is None else match[1].upper()


def gguf_patterns(quantization: str) -> list[str]:
    """Patterns for the GGUF file of a quantization, whether its name is in capitals or not."""
    name = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in quantization)
    return [f"*[-._/]{name}{SUFFIX}", f"{name}{SUFFIX}"]


def choose_gguf(repo: str, files: Sequence[str], quantization: str) -> str:
    """The GGUF file of this quantization.

    Raises:
        ModelError: there is none, or several; or it is cut into parts, which jengine does not read.
    """
    ggufs = [file for file in files if file.endswith(SUFFIX) and not _any(file, PROJECTORS)]
    matching = [file for file in ggufs if quantization_of(file) == quantization.upper()]
    whole = [file for file in matching if not _PART.search(file.removesuffix(SUFFIX))]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise ModelError(f"has several files of {quantization}: {', '.join(sorted(whole))}", file=repo)
    if matching:
        raise ModelError(
            f"{quantization} is in {len(matching)} files; GGUF files in parts are not supported", file=repo
        )
    names = sorted({name for file in ggufs if (name := quantization_of(file)) is not None})
    there = f"it has {', '.join(f'{repo}:{name}' for name in names)}" if names else "it has no GGUF files"
    raise ModelError(f"has no GGUF file of {quantization}; {there}", file=repo)


def model_files(name: HubName, files: Sequence[str]) -> list[str]:
    """The files of a repository that a model needs.

    Raises:
        ModelError: it has no such model.
    """
    ggufs = any(file.endswith(SUFFIX) for file in files)
    # repositories of GGUF files may have a config.json, but no weights for it
    weights = any("/" not in file and file.endswith((".safetensors", ".bin")) for file in files)
    if name.quantization is None and "config.json" in files and (weights or not ggufs):
        needed = [
            file for file in files if "/" not in file and _any(file, HUB_FILES) and not _any(file, OTHERS)
        ]
        if not any(file.endswith(".safetensors") for file in needed):
            needed += [file for file in files if "/" not in file and _any(file, BIN_FILES)]
        return needed + [file for file in files if _any(file, IN_FOLDERS)]
    if name.quantization is None and not ggufs:
        raise ModelError("has neither config.json nor GGUF files", file=name.repo)
    return [choose_gguf(name.repo, files, name.quantization or DEFAULT_QUANTIZATION)]


def _any(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(file, pattern) for pattern in patterns)


def is_cached(name: HubName, revision: str | None = None) -> bool:
    """Whether an engine of this model needs to download nothing."""
    formats = {name.quantization or DEFAULT_QUANTIZATION, name.quantization}
    wanted = {format and format.upper() for format in formats}
    return any(
        quantization in wanted and _complete(path) for quantization, path, _ in _models(name.repo, revision)
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
            sizes = (size for stored, _, size in _models(name.repo, revision) if wanted in (None, stored))
            return max(sizes, default=0)
    return 0


def _models(repository: str, revision: str | None) -> Iterator[tuple[str | None, Path, int]]:
    """The models of a repository in the cache, with their bytes on disk: the quantizations of GGUF files and
    their paths, and None and the folder of a revision with other weights.

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
                yield quantization, Path(file.file_path), file.size_on_disk
        weights = [file for file in cached.files if file.file_name.endswith(WEIGHTS)]
        if (
            any(Path(file.file_path).parent == folder for file in weights)
            and (folder / "config.json").exists()
        ):
            yield None, folder, cached.size_on_disk


def _complete(path: Path) -> bool:
    """Whether all files are there that an index of weights lists."""
    for index in path.glob("*.index.json") if path.is_dir() else ():
        with contextlib.suppress(ModelError, OSError, ValueError, TypeError, AttributeError):
            listed = set(read_object(index).get("weight_map", {}).values())
            if not all((path / file).exists() for file in listed):
                return False
    return True
