"""`jengine serve`: a server for a model, over gRPC and HTTP."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from jengine import EngineConfig, JengineError
from jengine.commands.flags import COMMON_ENGINE, add_model
from jengine.commands.terminal import note
from jengine.vllm.flags import add_fields, add_help, add_vllm_flags
from jengine.vllm.translate import SERVE_SETTINGS

# options of the server and the engine that a short help shows, beside COMMON_ENGINE
COMMON = (
    *("host", "port", "grpc_port", "metrics_port", "page", "served_model_name", "tool_call_parser"),
    *("api_key", "api_keys", "max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size"),
)

EPILOG = """\
Each option may also be given as an environment variable (JENGINE_PORT=8000) or in a TOML file (port = 8000),
whose path is given by --config or JENGINE_CONFIG. MODEL may be given there too, as `model`. Flags override
variables, and variables override the file.

SIGTERM: health reports NOT_SERVING, and requests are accepted for --lame-duck-seconds more. After that, or at
Ctrl-C, no new request is accepted, and running ones have --drain-seconds before they are aborted. A second
Ctrl-C exits immediately.
"""


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from jengine.serving.config import (  # plain data; the server itself is imported later
        SERVE_DEFAULTS,
        ServerConfig,
    )

    parser = commands.add_parser(
        "serve",
        help="serve a model over OpenAI's API and gRPC",
        description=(
            "Serve a model: OpenAI's and Anthropic's APIs at --port, and gRPC at --grpc-port. When it is"
            " ready, prints its\naddresses and a first request to stdout; progress and the log go to stderr."
        ),
        epilog=EPILOG,
        add_help=False,
    )
    add_help(parser, (*COMMON, *COMMON_ENGINE))
    add_model(parser, nargs="?", default=argparse.SUPPRESS)
    parser.add_argument(
        "more_models",
        metavar="MODEL",
        nargs="*",
        default=argparse.SUPPRESS,
        help="others, which are loaded when a request names them",
    )
    parser.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="a TOML file of options")
    add_fields(parser.add_argument_group("server"), ServerConfig)
    add_fields(parser.add_argument_group("engine"), EngineConfig, ("model",), SERVE_DEFAULTS)
    add_vllm_flags(parser, SERVE_SETTINGS.values(), note)
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> None:
    from jengine.serving.config import resolve_models

    flags = {name: value for name, value in vars(options).items() if name != "run"}
    server, (default, *others) = resolve_models(flags, flags.pop("more_models", []))
    engine = default.engine
    if engine.process_id:
        from jengine import follow

        follow(engine, progress=False)
        return

    from jengine.integrations.smg import added_services
    from jengine.serving.http.front import listen
    from jengine.serving.processes.engine_fleet import EngineOfServer, maker
    from jengine.serving.processes.engine_process import OnEnd
    from jengine.spi import check_model

    services = added_services(server)
    makers = [maker(server, model.engine) for model in (default, *others)]
    first = makers[0](None)
    waiting = [first]

    def make(on_end: OnEnd) -> EngineOfServer:
        if not waiting:
            return makers[0](on_end)
        first.on_end = on_end
        return waiting.pop()

    try:
        with contextlib.ExitStack() as stack:
            for model in (default, *others):
                check_model(model.engine.model)
            # clients that call while libraries are imported wait for an answer, rather than being refused
            http = None if server.port is None else stack.enter_context(listen(server, "port"))
            for option in () if http is None else ("grpc_port", "metrics_port"):
                if isinstance(number := getattr(server, option), int) and number != server.port:
                    listen(server, option).close()  # tells at once that it is in use
            first.spawn()  # before the server is imported, since both imports take seconds

            from jengine.serving import app

            served = [app.Served(default.name, make, *_need(engine, others))]
            served += [
                app.Served(model.name, makes, *_need(model.engine, others))
                for model, makes in zip(others, makers[1:], strict=True)
            ]
            app.run(server, served, services, http)
    except JengineError as error:
        # caused by the environment rather than the options: the port is in use, the model cannot be read
        print(f"jengine: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        first.quit()


def _need(engine: EngineConfig, others: Sequence[object]) -> tuple[float, int]:
    """An engine that shares a machine: its share of a GPU, and the bytes of its weights' files."""
    if not others:
        return 0.0, 0
    from jengine.hub.files import bytes_on_disk  # scans the cache of the hub

    return engine.gpu_memory_utilization, bytes_on_disk(engine.model, engine.revision)
