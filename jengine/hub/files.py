"""Which files of a repository a model needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from jengine.base.errors import ModelError
from jengine.base.gguf_file import SUFFIX

HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]  # weights, configuration, tokenizer
WITHOUT_WEIGHTS = HUB_FILES[1:]
BIN_FILES = ["pytorch_model*.bin"]  # if the hub has no safetensors
MODULES = ("Pooling", "Normalize", "LogitScore")  # of sentence-transformers, in folders of their own
IN_FOLDERS = ["additional_chat_templates/*.jinja", *(f"*_{module}/config.json" for module in MODULES)]
OTHERS = ["consolidated*", "*/consolidated*"]  # the same weights in other layouts
PROJECTORS = ["mmproj*", "*/mmproj*"]  # encoders of images, beside a model's GGUF file
DEFAULT_QUANTIZATION = "Q4_K_M"  # of a repository that only has GGUF files
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?", re.ASCII)
# the end of a GGUF file's name, such as Q4_K_M, UD-Q4_K_XL, IQ3_XXS or BF16
_QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|B?F\d+|MXFP4(?:_\w+)?))$", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}$")  # of a model in several files


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
    if model != "demo" and not Path(model).expanduser().exists():
        hub_name(model)


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
    if name.quantization is None and "config.json" in files:
        needed = [
            file for file in files if "/" not in file and _any(file, HUB_FILES) and not _any(file, OTHERS)
        ]
        if not any(file.endswith(".safetensors") for file in needed):
            needed += [file for file in files if "/" not in file and _any(file, BIN_FILES)]
        return needed + [file for file in files if _any(file, IN_FOLDERS)]
    if name.quantization is None and not any(file.endswith(SUFFIX) for file in files):
        raise ModelError("has neither config.json nor GGUF files", file=name.repo)
    return [choose_gguf(name.repo, files, name.quantization or DEFAULT_QUANTIZATION)]


def _any(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(file, pattern) for pattern in patterns)
