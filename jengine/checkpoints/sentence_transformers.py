"""Reads sentence-transformers' files in a model's folder: how the model embeds, or scores pairs of texts.

modules.json lists modules in order. An embedding model is a Transformer, a Pooling and perhaps a Normalize. A
reranker based on a language model is a Transformer and a LogitScore. Each module's configuration is in the
module's folder, the Transformer's and what concerns all of them beside it. Versions 2 to 6 keep the same
settings in different files. What is not applied is rejected by name, unless it has no effect on vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from jengine.base.errors import ModelError
from jengine.base.gguf_file import is_gguf, open_gguf
from jengine.base.model_files import read_json, read_object
from jengine.core.pooling import Embedder, Pooling, Reranker, Similarity

MODULES = "modules.json"
OPTIONS = tuple(  # of the first module
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
COMMON = "config_sentence_transformers.json"  # of all modules
TOKENIZER = "tokenizer_config.json"
POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
FLAGS = {  # older files have a flag for each mode
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
GGUF_POOLINGS: dict[int, Pooling | None] = {0: None, 1: "mean", 3: "last"}  # 2: cls, 4: rank
ACTIVATIONS = {  # of a reranker: whether scores are probabilities
    None: True,
    "torch.nn.modules.activation.Sigmoid": True,
    "torch.nn.modules.linear.Identity": False,
}
# Settings of all modules, and of the first, that are applied, or that concern only how the library computes.
SHARED = ("__version__", "model_type", "prompts", "default_prompt_name")
EMBEDDING = (*SHARED, "similarity_fn_name", "truncate_dim")
RERANKING = (*SHARED, "activation_fn")
FIRST = (
    "max_seq_length", "transformer_task", "modality_config", "module_output_name", "processing_kwargs",
    "unpad_inputs", "query_length", "document_length",
    *(f"{kind}_{form}" for kind in ("model", "config") for form in ("args", "kwargs")),
)  # fmt: skip
LOADING = ("tokenizer_args", "tokenizer_kwargs", "processor_kwargs")
HARMLESS = (
    "attn_implementation", "device_map", "dtype", "local_files_only", "low_cpu_mem_usage", "model_max_length",
    "padding_side", "revision", "token", "torch_dtype", "trust_remote_code", "use_fast",
)  # fmt: skip
WITHOUT = "embeddings=False loads the model without it"


class _Module(NamedTuple):
    kind: str
    folder: str  # relative to the model's


def choose_embedder(wanted: bool | None, folder: Path, size: int) -> Embedder | None:
    """How the model embeds; None if it should not.

    Args:
        wanted: EngineConfig.embeddings.
        folder: of the model, or a GGUF file.
        size: the model's hidden_size.

    Raises:
        ModelError: as read_embedder.
    """
    if wanted is False:
        return None
    read = _of_gguf if is_gguf(folder) else read_embedder
    return read(folder, size) or (Embedder(size=size) if wanted else None)


def _of_gguf(file: Path, size: int) -> Embedder | None:
    fields = open_gguf(file)
    kind = fields.get(f"{fields.architecture}.pooling_type", 0)
    if kind not in GGUF_POOLINGS:
        raise ModelError(
            f"pooling_type={kind!r} is not supported; 1 (mean) and 3 (last) are; {WITHOUT}", file=file
        )
    pooling = GGUF_POOLINGS[kind]
    return None if pooling is None else Embedder(size=size, pooling=pooling)


def read_embedder(folder: Path, size: int) -> Embedder | None:
    """How the model embeds; None if the folder does not say.

    Args:
        size: the model's hidden_size.

    Raises:
        ModelError: a file is unreadable, or has unsupported settings.
    """
    modules = _modules(folder)
    kinds = [module.kind for module in modules]
    if "Pooling" not in kinds:
        return None
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        reason = (
            f"{', '.join(kinds)} are not Transformer, Pooling and perhaps Normalize; embeddings=False loads"
            " the model without them"
        )
        raise ModelError(reason, file=folder / MODULES)
    if modules[0].folder:
        raise ModelError(
            f"the Transformer is in {modules[0].folder!r}, not beside this file", file=folder / MODULES
        )
    for module in modules[2:]:
        _check_normalize(folder / module.folder / "config.json")
    common = _fields(folder / COMMON, EMBEDDING)
    pooling, includes_prompt = _pooling(folder / modules[1].folder / "config.json", size)
    prompt = _default_prompt(folder, common) or ""
    if prompt and not includes_prompt:
        reason = f"include_prompt=false with a default prompt is not supported; {WITHOUT}"
        raise ModelError(reason, file=folder / modules[1].folder / "config.json")
    options = _options(folder)
    if "message" in (options.get("modality_config") or {}):
        reason = f"modality_config: embedding through the chat template is not supported; {WITHOUT}"
        raise ModelError(reason, file=folder / OPTIONS[0])
    return Embedder(
        size=size,
        pooling=pooling,
        normalize="Normalize" in kinds,
        max_tokens=_longest(folder, options),
        prompt=prompt,
        truncate_dim=_whole(folder / COMMON, "truncate_dim", common.get("truncate_dim"), size),
        similarity=_similarity(folder, common),
    )


def read_reranker(folder: Path) -> Reranker | None:
    """How the model scores pairs; None if the folder does not say.

    Raises:
        ModelError: a file is unreadable, or has unsupported settings.
    """
    module = next((module for module in _modules(folder) if module.kind == "LogitScore"), None)
    if module is None:
        return None
    file = folder / module.folder / "config.json"
    fields = read_object(file)
    for name in ("true_token_id", "false_token_id"):
        if type(fields.get(name)) is not int or fields[name] < 0:
            reason = (
                f"{name}={fields.get(name)!r} is not a token id; scores compare the probabilities of two"
                " tokens"
            )
            raise ModelError(reason, file=file)
    common, options = _fields(folder / COMMON, RERANKING), _options(folder)
    config = _object(folder / "config.json")  # older versions write it there
    activation = (
        common.get("activation_fn")
        or (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"activation_fn={activation!r} is not supported; Sigmoid and Identity are", file=folder / COMMON
        )
    template = (options.get("processing_kwargs") or {}).get("chat_template") or {}
    return Reranker(
        true_token_id=fields["true_token_id"],
        false_token_id=fields["false_token_id"],
        instruction=_default_prompt(folder, common),
        add_generation_prompt=bool(template.get("add_generation_prompt", False)),
        probability=ACTIVATIONS[activation],
        max_tokens=_longest(folder, options),
    )


def _modules(folder: Path) -> list[_Module]:
    """The modules, in order; none if the file is missing."""
    file = folder / MODULES
    if not file.exists():
        return []
    try:
        return [
            _Module(str(module["type"]).rsplit(".", 1)[-1], str(module["path"]).strip("/"))
            for module in read_json(file)
        ]
    except (TypeError, KeyError) as wrong:
        raise ModelError(f"is not a list of modules: {wrong!r}", file=file) from None


def _object(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file that may be missing."""
    return read_object(file) if file.exists() else {}


def _fields(file: Path, known: tuple[str, ...]) -> dict[str, Any]:
    """The object in a file that may be missing.

    Raises:
        ModelError: it has a setting that is not known.
    """
    fields = _object(file)
    _check(file, fields, known)
    return fields


def _check(file: Path, fields: Mapping[str, Any], known: tuple[str, ...], inside: str = "") -> None:
    for name, value in fields.items():
        if value and name not in known:
            raise ModelError(f"{inside}{name}={value!r} is not supported; {WITHOUT}", file=file)


def _options(folder: Path) -> dict[str, Any]:
    """Settings of the first module.

    Raises:
        ModelError: one is not supported.
    """
    file = next((folder / name for name in OPTIONS if (folder / name).exists()), folder / OPTIONS[0])
    options = _fields(file, (*FIRST, *LOADING))
    for name in (*LOADING, *(name for name in FIRST if name.endswith(("_args", "_kwargs")))):
        if name != "processing_kwargs":
            _check(file, options.get(name) or {}, HARMLESS, f"{name}.")
    for name, inner in (options.get("processing_kwargs") or {}).items():
        known = {"text": ("max_length", "truncation", "padding"), "chat_template": ("add_generation_prompt",)}
        _check(file, inner or {}, known.get(name, ()), f"processing_kwargs.{name}.")
    return options


def _longest(folder: Path, options: Mapping[str, Any]) -> int | None:
    """The most tokens of a text. It is where the library keeps it: of several numbers it uses the first."""
    file = folder / OPTIONS[0]
    text = (options.get("processing_kwargs") or {}).get("text") or {}
    loading = [(options.get(name) or {}).get("model_max_length") for name in LOADING]
    places = (text.get("max_length"), *loading, options.get("max_seq_length"))
    for stated in places:
        if stated is not None:
            return _whole(file, "max_seq_length", stated)
    limit = _object(folder / TOKENIZER).get("model_max_length")
    # transformers writes 1e30 if there is none
    return limit if type(limit) is int and 0 < limit < 2**31 else None


def _whole(file: Path, name: str, value: Any, limit: int | None = None) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise ModelError(f"{name}={value!r} is not a whole number from 1 on", file=file)
    return value if limit is None else min(value, limit)


def _default_prompt(folder: Path, common: Mapping[str, Any]) -> str | None:
    """The text in front of each text; None if there is none."""
    name, prompts = common.get("default_prompt_name"), common.get("prompts") or {}
    if name is None:
        return None
    if not isinstance(prompts, dict) or not isinstance(prompts.get(name), str):
        raise ModelError(f"default_prompt_name={name!r} is not one of prompts", file=folder / COMMON)
    return str(prompts[name])


def _similarity(folder: Path, common: Mapping[str, Any]) -> Similarity:
    name = common.get("similarity_fn_name") or "cosine"
    if name not in get_args(Similarity):
        limit = ", ".join(get_args(Similarity))
        reason = f"similarity_fn_name={name!r} is not supported; {limit} are; {WITHOUT}"
        raise ModelError(reason, file=folder / COMMON)
    return cast(Similarity, name)


def _check_normalize(file: Path) -> None:
    for name, value in _object(file).items():
        if value not in ("sentence_embedding", None):
            raise ModelError(f"{name}={value!r} is not supported; {WITHOUT}", file=file)


def _pooling(file: Path, size: int) -> tuple[Pooling, bool]:
    """The mode, and whether it includes the tokens of a prompt in front of the text."""
    fields = read_object(file)
    known = ("pooling_mode", *FLAGS, "embedding_dimension", "word_embedding_dimension", "include_prompt")
    _check(file, fields, known)
    value = fields.get("pooling_mode") or [mode for flag, mode in FLAGS.items() if fields.get(flag)] or "mean"
    # sentence-transformers would concatenate several vectors
    modes = value if isinstance(value, list) else [value]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelError(
            f"pooling_mode={value!r} is not supported; one of {', '.join(POOLINGS)} is", file=file
        )
    stated = fields.get("embedding_dimension", fields.get("word_embedding_dimension", size))
    if stated != size:
        raise ModelError(f"embedding_dimension={stated!r} is not the model's hidden_size, {size}", file=file)
    return POOLINGS[modes[0]], bool(fields.get("include_prompt", True))
