"""Finds a model's folder and reads its configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import get_args

from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.gguf_file import SUFFIX, is_gguf, open_gguf
from jengine.base.model_files import malformed, read_object
from jengine.checkpoints import converted
from jengine.checkpoints.files import found_tensors
from jengine.checkpoints.hugging_face import model_config, token_ids
from jengine.checkpoints.in_memory import Tensors
from jengine.checkpoints.output_head import untied_head
from jengine.checkpoints.quantized_formats import OPTIMIZER_FILE, read_fields
from jengine.core.model_options import CheckpointFormat
from jengine.core.request import SamplingParams
from jengine.hub.files import (
    BIN_FILES,
    DEFAULT_QUANTIZATION,
    HUB_FILES,
    IN_FOLDERS,
    TOKENIZER_FILES,
    WITHOUT_WEIGHTS,
    HubName,
    hub_name,
    local_path,
)
from jengine.hub.repository import download, find_gguf, gguf_alone
from jengine.models.config import ModelConfig

log = logging.getLogger("jengine")
DEMO = Path(__file__).parent.parent / "demo"
SAMPLING_DEFAULTS = {  # names in generation_config.json; the ones that vLLM applies
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
USUAL_LAYERS = 128  # declaring so many takes moments
CONFIG_FILES = [
    "config.json",
    "generation_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    OPTIMIZER_FILE,
    converted.MARK,
]  # metadata without weights


def resolve(model: str, revision: str | None = None, files: list[str] = HUB_FILES) -> Path:
    """Locates a model: `demo`, a local folder, or a hub id, whose files are downloaded unless they are
    cached. `owner/name:Q4_K_M` is the GGUF file of this quantization; so is `owner/name` if the repository
    has no other weights.

    For a GGUF file, or a folder with one and without other weights, returns the file's path; for a
    config.json, its folder.

    Raises:
        ModelError: the model does not exist, or cannot be downloaded.
    """
    if model == "demo":
        return DEMO
    path = local_path(model)
    if path.is_dir():
        return _only_gguf(path, files) or path
    if is_gguf(path):
        return path
    if path.is_file() and path.name == "config.json":
        return path.parent
    if path.exists():
        raise ModelError("is a file; a model is a GGUF file or a folder in Hugging Face's layout", file=path)
    name = hub_name(model)
    if name.quantization is not None:
        return find_gguf(name, revision, weights=files is HUB_FILES)
    folder = _download(model, revision, files)
    tokenizer = ["tokenizer.json", "tokenizer_config.json"] if files is TOKENIZER_FILES else []
    if any((folder / name).exists() for name in ("config.json", converted.MARK, *tokenizer)):
        if files is CONFIG_FILES and not _has_weights(folder):
            return gguf_alone(HubName(model, DEFAULT_QUANTIZATION), revision) or folder
        if files is not HUB_FILES or _has_weights(folder):
            return folder
    return find_gguf(HubName(model, DEFAULT_QUANTIZATION), revision, weights=files is HUB_FILES)


def _only_gguf(folder: Path, files: list[str]) -> Path | None:
    """The GGUF file of a folder that has exactly one and no other weights. If weights are not wanted, but a
    tokenizer or a configuration for parameters in memory, a config.json is enough, too.
    """
    of_weights = files is HUB_FILES or files is CONFIG_FILES
    if _has_weights(folder) or (not of_weights and (folder / "config.json").exists()):
        return None
    ggufs = list(folder.glob(f"*{SUFFIX}"))
    if len(ggufs) > 1:
        names = ", ".join(sorted(file.name for file in ggufs))
        raise ModelError(f"has several GGUF files; name one of them: {names}", file=folder)
    return ggufs[0] if ggufs else None


def _has_weights(folder: Path) -> bool:
    """Whether a folder has weights in Hugging Face's layout, or converted ones."""
    return converted.is_converted(folder) or any(
        any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin")
    )


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

        with malformed(path):
            config = model_config(config_fields(path), file=path)
            check_layers(config, open_gguf(path).tensors, path)
            return dataclasses.replace(config, stored=stored_weights(path, config.num_layers))
    file = path / (converted.MARK if converted.is_converted(path) else "config.json")
    if not file.exists() and converted.has_orbax(path):
        raise ModelError(
            f"has Orbax files but no {converted.MARK}: `jengine convert` did not write or did not finish it",
            file=path,
        )
    if file.name == converted.MARK:
        config = converted.stored_config(read_object(file), file=file)
    else:
        config = model_config(read_fields(path), file=file)
    if file.name != converted.MARK and (config.tie_embeddings or config.num_layers > USUAL_LAYERS):
        tensors: Tensors = {}
        with contextlib.suppress(ModelError):  # if files are missing, loading has an error
            tensors = found_tensors(path, None)
        check_layers(config, tensors, path)
        config = with_stored_head(config, tensors)
    generation = path / "generation_config.json"
    if not generation.exists():
        return config
    eos = read_object(generation).get("eos_token_id")
    if eos is None:
        return config
    with malformed(generation):
        return dataclasses.replace(config, eos_token_ids=token_ids(eos))


def with_stored_head(config: ModelConfig, tensors: Tensors) -> ModelConfig:
    """The configuration for these tensors: an output head that differs from the embeddings is used, as in
    transformers, although the configuration says that it is tied to them.
    """
    if not config.tie_embeddings or (name := untied_head(tensors)) is None:
        return config
    log.warning(
        "%s: tie_word_embeddings is true, but %s differs from the embeddings; it is used as it is",
        tensors[name].file,
        name,
    )
    return dataclasses.replace(config, tie_embeddings=False)


def check_layers(config: ModelConfig, names: Collection[str], file: Path) -> None:
    """Checks that tensors of all layers are there, before anything is made for each layer.

    Args:
        names: of all tensors; empty: they are not known.

    Raises:
        ModelError: there are fewer layers.
    """
    if config.num_layers <= USUAL_LAYERS or not names:
        return
    numbers = (re.search(r"\.(\d{1,9})\.", name) for name in names)
    stored = 1 + max((int(number[1]) for number in numbers if number), default=-1)
    if config.num_layers > stored:
        reason = f"num_hidden_layers={config.num_layers}, but there are tensors of only {stored} layers"
        raise ModelError(reason, file=file)


def kept_format(quantization: str | None, path: Path) -> str | None:
    """The quantization to apply on load: None if this names the format that a checkpoint has already.

    Raises:
        InvalidArgument: the checkpoint has another format.
    """
    if quantization not in get_args(CheckpointFormat):
        return quantization
    method = "gguf" if is_gguf(path) else None
    if method is None and (path / "config.json").exists():
        file = path / "config.json"
        with malformed(file):
            fields = read_fields(path)
            stored = fields.get("quantization_config") or fields.get("compression_config") or {}
            method = stored.get("quant_method")
    if method != str(quantization).removesuffix("_marlin").removesuffix("_fp4"):
        has = "is not quantized" if method is None else f"is stored as {method}"
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
    fields = read_object(file) if file.exists() else {}
    defaults = {
        ours: fields[theirs] for theirs, ours in SAMPLING_DEFAULTS.items() if fields.get(theirs) is not None
    }
    try:
        return SamplingParams(**defaults)
    except InvalidArgument as wrong:
        raise ModelError(str(wrong), file=file) from None
