"""Reads sentence-transformers' files in a model's folder: how the model embeds, or scores pairs of texts.

modules.json lists modules in order. An embedding model is a Transformer, a Pooling and perhaps a Normalize. A
reranker based on a language model is a Transformer and a LogitScore. Each module's configuration is in the
module's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jengine.base.errors import ModelError
from jengine.base.model_files import read_json, read_object
from jengine.core.pooling import Embedder, Pooling, Reranker

MODULES = "modules.json"
OPTIONS = "sentence_bert_config.json"  # of the first module
PROMPTS = "config_sentence_transformers.json"
POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
FLAGS = {  # older files have a flag for each mode
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def choose_embedder(wanted: bool | None, folder: Path, size: int) -> Embedder | None:
    """How the model embeds; None if it should not.

    Args:
        wanted: EngineConfig.embeddings.
        size: the model's hidden_size.

    Raises:
        ModelError: as read_embedder.
    """
    if wanted is False:
        return None
    return read_embedder(folder, size) or (Embedder(size=size) if wanted else None)


def read_embedder(folder: Path, size: int) -> Embedder | None:
    """How the model embeds; None if the folder does not say.

    Args:
        size: the model's hidden_size.

    Raises:
        ModelError: a file is unreadable, or has unsupported settings.
    """
    modules = _modules(folder)
    if "Pooling" not in modules:
        return None
    file = folder / MODULES
    if [*modules] not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        reason = (
            f"{', '.join(modules)} are not Transformer, Pooling and perhaps Normalize; embeddings=False loads"
            " the model without them"
        )
        raise ModelError(reason, file=file)
    options = _object(folder / OPTIONS)
    if options.get("do_lower_case"):
        raise ModelError(
            "do_lower_case=true is not supported; embeddings=False loads the model without it", file=file
        )
    longest = options.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ModelError(f"max_seq_length={longest!r} is not a number of tokens", file=file)
    pooling = _pooling(folder / modules["Pooling"] / "config.json", size)
    return Embedder(size=size, pooling=pooling, normalize="Normalize" in modules, max_tokens=longest)


def read_reranker(folder: Path) -> Reranker | None:
    """How the model scores pairs; None if the folder does not say.

    Raises:
        ModelError: a file is unreadable, or has unsupported settings.
    """
    modules = _modules(folder)
    if "LogitScore" not in modules:
        return None
    file = folder / modules["LogitScore"] / "config.json"
    fields = read_object(file)
    for name in ("true_token_id", "false_token_id"):
        if type(fields.get(name)) is not int or fields[name] < 0:
            reason = (
                f"{name}={fields.get(name)!r} is not a token id; scores compare the probabilities of two"
                " tokens"
            )
            raise ModelError(reason, file=file)
    prompts = _object(folder / PROMPTS)
    instruction = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name"))
    template = (_object(folder / OPTIONS).get("processing_kwargs") or {}).get("chat_template") or {}
    return Reranker(
        true_token_id=fields["true_token_id"],
        false_token_id=fields["false_token_id"],
        instruction=instruction,
        add_generation_prompt=bool(template.get("add_generation_prompt", False)),
    )


def _modules(folder: Path) -> dict[str, str]:
    """The kinds of modules, in order, and their folders; empty if the file is missing."""
    file = folder / MODULES
    if not file.exists():
        return {}
    try:
        return {str(module["type"]).rsplit(".", 1)[-1]: str(module["path"]) for module in read_json(file)}
    except (TypeError, KeyError) as wrong:
        raise ModelError(f"is not a list of modules: {wrong!r}", file=file) from None


def _object(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file that may be missing."""
    return read_object(file) if file.exists() else {}


def _pooling(file: Path, size: int) -> Pooling:
    fields = read_object(file)
    given = fields.get("pooling_mode") or [mode for flag, mode in FLAGS.items() if fields.get(flag)] or "mean"
    # sentence-transformers would concatenate several vectors
    modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelError(
            f"pooling_mode={given!r} is not supported; one of {', '.join(POOLINGS)} is", file=file
        )
    stated = fields.get("embedding_dimension", fields.get("word_embedding_dimension", size))
    if stated != size:
        raise ModelError(f"embedding_dimension={stated!r} is not the model's hidden_size, {size}", file=file)
    return POOLINGS[modes[0]]
