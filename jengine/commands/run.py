"""`jengine run` downloads a model if needed, then chats or answers one prompt; `jengine pull` downloads."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from jengine import EngineConfig, JengineError
from jengine.base.display import counted
from jengine.commands.chat import KEYS, Conversation, Keyboard, chat_params, chat_with, local_model
from jengine.commands.flags import (
    CHAT_DEFAULTS,
    COMMON_ENGINE,
    COMMON_SAMPLING,
    add_lora,
    add_model,
    add_sampling_and_engine,
    engine_fields,
    follows,
)
from jengine.commands.terminal import note, size_text
from jengine.hub.files import HubName, is_cached
from jengine.hub.repository import Repository
from jengine.vllm.flags import add_help

SPARE = 1 << 28  # bytes of the disk to leave free
MODEL = "owner/name, or owner/name:Q4_K_M for a GGUF file"


def add_pull(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    say: Callable[[str], None] = (lambda text: None) if quiet else note
    size = f"{size_text(repository.to_download)} of {size_text(sum(repository.sizes.values()))}"
    say(f"{name}, revision {repository.commit[:8]}: {size} to download")
    problems, free = list[str](), repository.free()
    if free < repository.to_download + SPARE:
        download = size_text(repository.to_download)
        problems += [f"the disk has {size_text(free)} left for a download of {download}"]
    problems += _memory(config, say)
    if problems and not force:
        raise JengineError(f"{name}: {'; '.join(problems)}. --force downloads it anyway")
    for problem in problems:
        say(f"{name}: {problem}")
    folder = repository.fetch(quiet)
    say(f"{counted(len(repository.sizes), 'file')} in {folder}")
    return True


def _memory(config: EngineConfig, say: Callable[[str], None]) -> list[str]:
    """What keeps an engine from running the model here, after a line about its memory."""
    from jengine.capacity.planning.memory import fits, local_room

    try:
        spec, memory, pages = local_room(config)
    except JengineError as unsupported:
        return [f"an engine cannot load it: {unsupported}"]
    cache = pages * memory.page + memory.states
    total = memory.beside + pages * memory.page
    say(
        f"An engine takes {size_text(total)} of {size_text(memory.limit)}"
        f" ({spec.mesh.local_devices[0].device_kind}):"
        f" {size_text(memory.weights)} of weights, {size_text(cache)} of KV cache,"
        f" {size_text(total - memory.weights - cache)} for programs",
    )
    if fits(memory, pages):
        return []
    return [f"an engine needs {size_text(total)} of memory, and this machine has {size_text(memory.limit)}"]


def add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="download a model if needed, and talk to it",
        description=(
            "Download a model if needed, as `jengine pull` does, and talk to it: a conversation as with"
            " `jengine chat`, or the answer\nto one PROMPT. Without a terminal, stdin is the prompt,"
            " or follows PROMPT."
        ),
        epilog="in a conversation:\n" + "".join(f"  {line}\n" for line in KEYS.splitlines()),
        add_help=False,
    )
    add_help(parser, (*COMMON_SAMPLING, *COMMON_ENGINE))
    add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="a message to answer, then leave")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_lora(parser)
    add_force(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bars and no notes")
    add_sampling_and_engine(parser, skip=("n",), defaults=CHAT_DEFAULTS)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if follows(options):
        return 0
    chat_params(options)  # rejects bad values before anything is loaded
    engine_options = engine_fields(options)
    prompt = _prompt(options.prompt)
    name = None if os.path.exists(options.model) else HubName.of(options.model)
    if name is not None and not is_cached(name, engine_options.get("revision")):
        config = EngineConfig.of(options.model, engine_options)
        pull(name, config, force=options.force, quiet=options.quiet)
    model = local_model(options)
    if prompt is None:
        chat_with(model, options)
        return 0
    params = chat_params(options, model.recommended)
    chat = Conversation(model, params, options.system, Keyboard(), shows_speed=not options.quiet)
    return 0 if chat.send(prompt) else 1


def _prompt(argument: str | None) -> str | None:
    """The message to answer; None: a conversation is wanted."""
    if sys.stdin.isatty() and argument != "-":
        return argument
    text = sys.stdin.buffer.read().decode(errors="surrogateescape").strip("\n")
    both = [part for part in (None if argument == "-" else argument, text) if part]
    if not both:
        raise JengineError("there is no prompt: neither PROMPT nor stdin has text")
    return "\n\n".join(both)
