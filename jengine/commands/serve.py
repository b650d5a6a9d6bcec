"""`jengine serve`: a gRPC server for a model."""

from __future__ import annotations

import argparse
import sys

from jengine import EngineConfig, JengineError
from jengine.commands.flags import add_fields

EPILOG = """\
Each option may also be given as an environment variable (JENGINE_PORT=8000) or in a TOML file (port = 8000), whose path is --config or
JENGINE_CONFIG; MODEL too, as `model`. A flag is stronger than a variable, a variable than the file.

SIGTERM: health says NOT_SERVING, and requests are accepted for --lame-duck-seconds more. Then, or at Ctrl-C: nothing new is accepted,
requests in flight have --drain-seconds, then they are aborted. A second Ctrl-C ends it at once.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from jengine.serving.config import SERVED, ServerConfig  # plain data; the server itself comes when it is asked for

    parser = commands.add_parser(
        "serve",
        help="serve a model over gRPC",
        description="Serve a model over gRPC. One line on stdout says when it is ready; progress and the log go to stderr.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=argparse.SUPPRESS,
        help="`demo`, a folder in Hugging Face's layout, a GGUF file, or a hub id",
    )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="a TOML file of options")
    add_fields(parser.add_argument_group("server"), ServerConfig)
    add_fields(parser.add_argument_group("engine"), EngineConfig, skip=("model",), defaults=SERVED)
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> None:
    from jengine.serving.config import resolve_config

    server, engine = resolve_config({name: value for name, value in vars(options).items() if name != "run"})

    if engine.process_id:
        from jengine import follow

        follow(engine, progress=False)
        return

    from jengine.serving import app
    from jengine.serving.engine_process import EngineProcess

    try:
        app.run(server, engine.model, lambda on_end: EngineProcess.of(engine, on_end, server.watchdog_seconds))
    except JengineError as error:  # not of what was typed, but of what was found: the port is taken, the model cannot be read
        print(f"jengine: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
