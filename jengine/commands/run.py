"""`jengine run`: downloads a model if needed, then chats or answers one prompt."""

from __future__ import annotations

import argparse
import os
import sys

from jengine import EngineConfig, JengineError
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
from jengine.commands.pull import add_force, pull
from jengine.hub.files import HubName, is_cached
from jengine.vllm.flags import add_help


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
