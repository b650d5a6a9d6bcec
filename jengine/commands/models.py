"""`jengine list` and `jengine rm`: models in the Hugging Face cache."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from jengine import JengineError
from jengine.base.display import counted
from jengine.commands.terminal import ago, agreed, note, size_text, table, write
from jengine.execution.cache_folders import cache_root, saved_folders
from jengine.hub.cached import CachedModel, cached_models, matching, remove
from jengine.hub.files import HubName

COLUMNS = "model", "revision", "size", "quantization", "last used", "programs"
# fields of a configuration that programs do not depend on, or that options change
APART = "eos_token_ids", "dtype", "shards"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listing = commands.add_parser(
        "list",
        help="show the models that have been downloaded",
        description=(
            "Show the models in the Hugging Face cache, from `jengine pull` or other programs. The last"
            " column says\nwhether compiled programs of the model are saved here; see `jengine cache`."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    listing.set_defaults(run=_list)
    removing = commands.add_parser(
        "rm",
        help="delete a downloaded model",
        description="Delete models from the Hugging Face cache.",
    )
    removing.add_argument("model", metavar="MODEL", nargs="+", help="as `jengine list` names it")
    removing.add_argument("--revision", metavar="TEXT", help="only this commit, branch or tag")
    removing.add_argument("--yes", action="store_true", help="do not ask")
    removing.set_defaults(run=_remove)


def _list(_: argparse.Namespace) -> None:
    found = cached_models()
    if not found:
        note("no models have been downloaded; `jengine pull owner/name` downloads one")
        return
    compiled = _compiled()
    write(table([COLUMNS, *(_row(model, compiled) for model in found)]))


def _row(model: CachedModel, compiled: list[dict[str, Any]]) -> tuple[str, ...]:
    from jengine.checkpoints import read_config  # imports jax

    try:
        facts = _plain(read_config(model.path).plain())
        programs = "compiled" if facts in compiled else "none"
    except JengineError:
        programs = "not supported"
    return (
        str(model.name),
        " ".join([model.commit[:8], *(f"({ref})" for ref in model.refs)]),
        size_text(model.bytes) + ("" if model.complete else ", incomplete"),
        _quantization(model),
        ago(time.time() - model.used),
        programs,
    )


def _quantization(model: CachedModel) -> str:
    """The format of the weights."""
    if model.name.quantization is not None:
        return model.name.quantization
    from jengine.base.model_files import malformed, read_object

    file = model.path / "config.json"
    try:
        with malformed(file):
            fields = read_object(file)
            stored = fields.get("quantization_config") or fields.get("compression_config") or {}
            return str(stored.get("quant_method") or fields.get("dtype") or fields.get("torch_dtype") or "?")
    except JengineError:
        return "?"


def _compiled() -> list[dict[str, Any]]:
    """The models for which programs are saved."""
    manifests = [folder.manifest() for folder in saved_folders(cache_root())]
    return [_plain(manifest.identity.get("model", {})) for manifest in manifests if manifest is not None]


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration as JSON has it, without what does not matter here."""
    return {
        name: value
        for name, value in json.loads(json.dumps(facts, default=list)).items()
        if name not in APART
    }


def _remove(options: argparse.Namespace) -> None:
    found = [model for text in dict.fromkeys(options.model) for model in _named(text, options.revision)]
    size = size_text(sum(model.bytes for model in found))
    names = ", ".join(f"{model.name} ({model.commit[:8]})" for model in found)
    if not options.yes and not agreed(f"Delete {names}, {size}?"):
        return
    freed = remove(found)
    note(f"{counted(len(found), 'model')} deleted, {size_text(freed)}")


def _named(text: str, revision: str | None) -> list[CachedModel]:
    """The cached models of this name; a name without a quantization has all of a repository."""
    name = HubName.of(text)
    found = [] if name is None else matching(name, revision)
    if not found:
        names = ", ".join(dict.fromkeys(str(model.name) for model in cached_models())) or "none"
        of = "" if revision is None else f" of revision {revision}"
        raise JengineError(f"{text}: no such model{of} has been downloaded; there are: {names}")
    return found
