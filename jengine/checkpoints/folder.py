"""Finds a model's folder and reads its configuration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.gguf_file import SUFFIX, is_gguf
from jengine.checkpoints import converted
from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import CheckpointFormat
from jengine.core.request import SamplingParams
from jengine.hub.download import download
from jengine.hub.files import (
    BIN_FILES,
    DEFAULT_QUANTIZATION,
    HUB_FILES,
    IN_FOLDERS,
    WITHOUT_WEIGHTS,
    HubName,
)
from jengine.hub.repository import find_gguf
from jengine.models.config import ModelConfig

DEMO = Path(__file__).parent.parent / "demo"
SAMPLING_DEFAULTS = {  # names in generation_config.json; the ones that vLLM applies
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
CONFIG_FILES = [
    "config.json",
    "generation_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    converted.MARK,
]  # metadata without weights


def resolve(model: str, revision: str | None = None, files: list[str] = HUB_FILES) -> Path:
    """Locates a model: `demo`, a local folder, or a hub id, whose files are downloaded unless they are
    cached. `owner/name:Q4_K_M` is the GGUF file of this quantization; so is `owner/name` if the repository
    has GGUF files only.

    For a GGUF file, or a folder with one and without config.json, returns the file's path; for a config.json,
    its folder.

    Raises:
        ModelError: the model does not exist, or cannot be downloaded.
    """
    if model == "demo":
        return DEMO
    path = Path(model).expanduser()
    if path.is_dir():
        return _only_gguf(path) or path
    if is_gguf(path):
        return path
    if path.is_file() and path.name == "config.json":
        return path.parent
    if path.exists():
        raise ModelError("is a file; a model is a GGUF file or a folder in Hugging Face's layout", file=path)
    local = model.startswith(("/", "./", "../", "~"))
    name = HubName.of(model)
    if local or name is None:
        kind = "file" if model.endswith(SUFFIX) else "folder"
        hint = (
            ""
            if local
            else "; a hub id has the form owner/name, such as Qwen/Qwen3-0.6B, or owner/name:Q4_K_M for a"
            " GGUF file"
        )
        raise ModelError(f"there is no such {kind}{hint}", file=path)
    if name.quantization is not None:
        return find_gguf(name, revision, weights=files is HUB_FILES)
    folder = _download(model, revision, files)
    if (folder / "config.json").exists() or converted.is_converted(folder):
        return folder
    return find_gguf(HubName(model, DEFAULT_QUANTIZATION), revision, weights=files is HUB_FILES)


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has exactly one and no configuration."""
    if (folder / "config.json").exists() or converted.is_converted(folder):
        return None
    files = list(folder.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(sorted(file.name for file in files))
        raise ModelError(f"has several GGUF files; name one of them: {names}", file=folder)
    return files[0] if files else None


def _download(model: str, revision: str | None, files: list[str]) -> Path:
    folder = download(model, revision, files, "*/*", quiet=files is CONFIG_FILES)
    if files in (HUB_FILES, WITHOUT_WEIGHTS):
        download(model, revision, IN_FOLDERS)  # patterns cannot exclude a single folder
    if files is HUB_FILES and not any(folder.glob("*.safetensors")):
        download(model, revision, BIN_FILES, "*/*")
    return folder


def read_config(path: Path) -> ModelConfig:
    """Reads a model's configuration. End-of-sequence ids come from generation_config.json if it has them.

    Raises:
        ModelError: a file is missing or unreadable, or a field is missing, invalid or not supported.
    """
    if is_gguf(path):
        from jengine.checkpoints.gguf import config_fields, stored_weights

        config = model_config(config_fields(path), file=path)
        return dataclasses.replace(config, stored=stored_weights(path, config.num_layers))
    file = path / (converted.MARK if converted.is_converted(path) else "config.json")
    if not file.exists() and converted.has_orbax(path):
        raise ModelError(
            f"has Orbax files but no {converted.MARK}: `jengine convert` did not write or did not finish it",
            file=path,
        )
    config = (converted.stored_config if file.name == converted.MARK else model_config)(
        read_json(file), file=file
    )
    generation = path / "generation_config.json"
    if not generation.exists():
        return config
    eos = read_json(generation).get("eos_token_id")
    if eos is None:
        return config
    ids = eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ModelError(f"eos_token_id={eos!r} is neither a token id nor a list of them", file=generation)
    return dataclasses.replace(config, eos_token_ids=tuple(ids))


def kept_format(quantization: str | None, path: Path) -> str | None:
    """The quantization to apply on load: None if this names the format that a checkpoint has already.

    Raises:
        InvalidArgument: the checkpoint has another format.
    """
    if quantization not in get_args(CheckpointFormat):
        return quantization
    found = "gguf" if is_gguf(path) else None
    if found is None and (path / "config.json").exists():
        fields = read_json(path / "config.json")
        stored = fields.get("quantization_config") or fields.get("compression_config") or {}
        found = stored.get("quant_method")
    if found != str(quantization).removesuffix("_marlin"):
        has = "is not quantized" if found is None else f"is stored as {found}"
        raise InvalidArgument(
            "quantization",
            quantization,
            f"this checkpoint {has}; None keeps weights as they are, int4 and others convert",
        )
    return None


def read_sampling_defaults(path: Path) -> SamplingParams:
    """The sampling parameters recommended by a model's generation_config.json; others have their defaults.

    Raises:
        ModelError: the file is unreadable, or a value is out of range.
    """
    file = path / "generation_config.json"
    fields = read_json(file) if file.exists() else {}
    given = {
        ours: fields[theirs] for theirs, ours in SAMPLING_DEFAULTS.items() if fields.get(theirs) is not None
    }
    try:
        return SamplingParams(**given)
    except InvalidArgument as wrong:
        raise ModelError(str(wrong), file=file) from None


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: the file is missing, unreadable or not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError("is missing", file=file) from None
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", file=file) from None
    except ValueError as error:
        raise ModelError(f"is not valid JSON: {error}", file=file) from None
    if not isinstance(content, dict):
        raise ModelError("is not a JSON object", file=file)
    return content
