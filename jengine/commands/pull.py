"""`jengine pull`: downloads a model from the Hugging Face hub, after a look at what it needs."""

from __future__ import annotations

import argparse
import os

from jengine import EngineConfig, JengineError
from jengine.base.display import counted
from jengine.commands.terminal import note, size_text
from jengine.hub.files import HubName
from jengine.hub.repository import Repository

SPARE = 1 << 28  # bytes of the disk to leave free
MODEL = "owner/name, or owner/name:Q4_K_M for a GGUF file"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model from the Hugging Face hub",
        description=(
            "Download a model from the Hugging Face hub into its cache, which jengine and other programs"
            " read. Says before what the\ndownload and an engine need, and refuses what fits neither this"
            " disk nor\nthis machine's or GPU's memory."
        ),
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("--revision", metavar="TEXT", help="a branch, tag or commit (default: main)")
    add_force(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bars and no notes")
    parser.set_defaults(run=_pull)


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="download a model even if it does not fit here")


def _pull(options: argparse.Namespace) -> None:
    name = HubName.of(options.model)
    if name is None or os.path.exists(options.model):
        raise JengineError(f"{options.model}: must be a model of the hub: {MODEL}")
    # the GPU's memory may belong to an engine
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    config = EngineConfig.of(options.model, {"revision": options.revision})
    if not pull(name, config, force=options.force, quiet=options.quiet) and not options.quiet:
        note(f"{name} is complete; nothing to download")


def pull(name: HubName, config: EngineConfig, *, force: bool, quiet: bool) -> bool:
    """Downloads what is missing of a model. Returns whether anything was.

    Args:
        config: the engine's options; the model's memory depends on them.
        force: whether to download a model that does not fit.

    Raises:
        ModelError: the hub has no such model, refuses it, or cannot be reached.
        JengineError: it does not fit, or is not supported.
    """
    repository = Repository.find(name, config.revision)
    if not repository.to_download:
        return False
    size = f"{size_text(repository.to_download)} of {size_text(sum(repository.sizes.values()))}"
    note_unless(quiet, f"{name}, revision {repository.commit[:8]}: {size} to download")
    problems = [*_disk(repository), *_memory(config, quiet)]
    if problems and not force:
        raise JengineError(f"{name}: {'; '.join(problems)}. --force downloads it anyway")
    for problem in problems:
        note_unless(quiet, f"{name}: {problem}")
    folder = repository.fetch(quiet)
    note_unless(quiet, f"{counted(len(repository.sizes), 'file')} in {folder}")
    return True


def note_unless(quiet: bool, text: str) -> None:
    if not quiet:
        note(text)


def _disk(repository: Repository) -> list[str]:
    free = repository.free()
    if free >= repository.to_download + SPARE:
        return []
    return [f"the disk has {size_text(free)} left for a download of {size_text(repository.to_download)}"]


def _memory(config: EngineConfig, quiet: bool) -> list[str]:
    """What keeps an engine from running the model here, after a line about its memory."""
    from jengine.capacity.planning.memory import fits, local_room

    try:
        spec, memory, pages = local_room(config)
    except JengineError as unsupported:
        return [f"an engine cannot load it: {unsupported}"]
    cache = pages * memory.page + memory.states
    total = memory.beside + pages * memory.page
    note_unless(
        quiet,
        f"An engine takes {size_text(total)} of {size_text(memory.limit)}"
        f" ({spec.mesh.local_devices[0].device_kind}):"
        f" {size_text(memory.weights)} of weights, {size_text(cache)} of KV cache,"
        f" {size_text(total - memory.weights - cache)} for programs",
    )
    if fits(memory, pages):
        return []
    return [f"an engine needs {size_text(total)} of memory, and this machine has {size_text(memory.limit)}"]
