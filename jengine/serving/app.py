"""The server application: listen, start the engine, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import resource
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import msgspec
from grpc_health.v1.health_pb2 import HealthCheckResponse
from starlette.applications import Starlette
from starlette.types import ASGIApp

from jengine.serving.calls.model_provider import Adapters, ModelInfo
from jengine.serving.config import PREFIX, ServerConfig, service_links
from jengine.serving.grpc.server import AddedService, BuiltServer, build_server
from jengine.serving.guards.access import Access, Tls
from jengine.serving.guards.sandbox import Tokenizing
from jengine.serving.http.app import api
from jengine.serving.http.endpoint import Parts
from jengine.serving.http.front import HttpFront, page_routes
from jengine.serving.logs import Lines, RequestLog, SparseLog, write_status
from jengine.serving.metrics.model_metrics import ModelMetrics
from jengine.serving.metrics.server_metrics import Metrics, OutcomeInterceptor, pages_of
from jengine.serving.models.pool import BESIDE, MemoryNeed, ModelPool, PooledModel
from jengine.serving.options import read_modules
from jengine.serving.playground.app import playground
from jengine.serving.processes.engine_fleet import EngineOfServer
from jengine.serving.processes.engine_process import OnEnd
from jengine.serving.processes.supervisor import Supervisor
from jengine.serving.requests.tracking import Spans

ENOUGH_DESCRIPTORS = 65_536
OTHER_DESCRIPTORS = 200  # those that are no connections of clients: of engines, files, fetched images
FLUSH_SECONDS = 1.0  # for last messages, after the last request has ended
log = logging.getLogger("jengine.serving")


def stop_signal(reload: Callable[[], None]) -> asyncio.Future[signal.Signals]:
    """The first signal that stops the server, as a future of the running event loop. A second SIGINT exits
    immediately.

    Args:
        reload: called on SIGHUP.
    """
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()
    attached = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # not under nohup

    def on_signal(number: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(number)
        if number == signal.SIGINT:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, _leave)

    def hung_up() -> None:
        if attached and not _has_terminal():
            on_signal(signal.SIGHUP)
        else:
            reload()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, hung_up)
    return stop


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal. It loses that when the terminal is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _leave(*_: object) -> None:
    """Exits immediately, without finishing requests. The engine process ends with this one."""
    os.write(sys.stderr.fileno(), b"\n")
    os._exit(130)


class Served(NamedTuple):
    """A model to serve.

    Attributes:
        name: as clients name it.
        make: makes its engine, see Supervisor.
        gpu_share: of a GPU's memory that its engine reserves.
        weights: bytes of its weights' files, as far as they are known.
    """

    name: str
    make: Callable[[OnEnd], EngineOfServer]
    gpu_share: float = 0.0
    weights: int = 0


def run(
    config: ServerConfig,
    models: Sequence[Served],
    services: Sequence[AddedService] = (),
    http: socket.socket | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains. A second SIGINT exits immediately with code 130. SIGHUP
    reloads.

    Args:
        models: the first one is the default, and is loaded before the server is ready. Its name is the one
            that config sets, if it does.
        services: of other protocols, on the port for gRPC.
        http: listens on config's port, if something does already.

    Raises:
        InvalidArgument: a file is invalid, an address is not available, or the model or device does not
            support an option.
        ModelError, OutOfMemory, EngineDead: the engine cannot start.
    """
    allow_descriptors()
    handler = logging.StreamHandler()
    handler.setFormatter(Lines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler])
    log.setLevel(config.log_level.upper())
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has gone
    if links := service_links(os.environ, PREFIX):
        log.info(
            "these variables are Kubernetes' service links, not options, and are ignored: %s",
            ", ".join(links),
        )
    ports = sum(port is not None for port in (config.port, config.grpc_port, config.metrics_port))
    if (limit := most_connections(config.max_connections, ports)) < config.max_connections:
        config = dataclasses.replace(config, max_connections=limit)
    default = models[0]._replace(name=[*config.served_names, models[0].name][0])
    asyncio.run(ServerApp(config, [default, *models[1:]], services, http).live())


def allow_descriptors() -> None:
    """Raises this process's limit as far as it may: shells often set 256 or 1,024, which idle connections
    would use up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def most_connections(wanted: int, ports: int) -> int:
    """How many connections each port may have, so that the process keeps descriptors for everything else:
    health could not be asked without one.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = (
        wanted if soft == resource.RLIM_INFINITY else min(wanted, max((soft - OTHER_DESCRIPTORS) // ports, 1))
    )
    if limit < wanted:
        log.warning("max_connections is %d, not %d: this process may open %d files", limit, wanted, soft)
    return limit


def report_sparsely(loop: asyncio.AbstractEventLoop) -> None:
    """Without descriptors, the event loop reports each attempt to accept a connection: thousands a second."""
    write = SparseLog(log.error)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and "accept" in context.get("message", ""):
            write("connections cannot be accepted: %s", error)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def _metrics_of(model: PooledModel) -> ModelMetrics:
    engine = model.supervisor
    return ModelMetrics(model.name, lambda: engine.load, lambda: engine.restarts, lambda: engine.totals)


class ServerApp:
    """A server. The arguments are those of `run`.

    Attributes:
        reloads: functions called in order on SIGHUP.
    """

    def __init__(
        self,
        config: ServerConfig,
        models: Sequence[Served],
        services: Sequence[AddedService] = (),
        http: socket.socket | None = None,
    ) -> None:
        self._config, self._name, self._services, self._listening = config, models[0].name, services, http
        self.reloads: list[Callable[[], None]] = []
        self._begun, self._stopping = time.monotonic(), False
        self._built: BuiltServer
        self._tokenizing = Tokenizing()
        adapters = Adapters(read_modules(config.lora_modules))  # the default model's
        self._models = ModelPool(
            [
                PooledModel(
                    model.name,
                    Supervisor(
                        model.name,
                        model.make,
                        on_state=self._changed,
                        adapters=Adapters() if i else adapters,
                        on_demand=i > 0,
                        guarded=self._tokenizing.guarded,
                    ),
                    MemoryNeed(model.gpu_share, model.weights + BESIDE),
                )
                for i, model in enumerate(models)
            ],
            max_loaded=config.max_loaded_models,
            unload_after=config.unload_after,
            aliases=config.served_names[1:],
        )
        self._front: HttpFront | None = None
        self._showing: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        """Runs the server from start to end."""
        config = self._config
        report_sparsely(asyncio.get_running_loop())
        observed = self._models if config.metrics_port is not None else ()
        metrics = Metrics(*map(_metrics_of, observed), prefix=config.metrics_prefix)
        access = Access(config, metrics)
        if access.reloads:
            self.reloads.append(access.reload)
        interceptors = [*([OutcomeInterceptor(metrics)] if metrics.models else []), *access.interceptors]
        request_log = None if config.request_log is None else RequestLog(config.request_log)
        spans = (
            None if config.otlp_traces_endpoint is None else Spans.of(config.otlp_traces_endpoint, self._name)
        )
        self._built = await build_server(
            config,
            self._models,
            metrics=metrics,
            request_log=request_log,
            spans=spans,
            credentials=access.credentials,
            interceptors=interceptors,
            services=self._services,
        )
        async with contextlib.AsyncExitStack() as stack:
            if request_log is not None:
                stack.callback(request_log.close)
            if spans is not None:
                stack.push_async_callback(asyncio.to_thread, spans.close)
            stack.push_async_callback(asyncio.to_thread, self._built.shared.close)
            stack.push_async_callback(asyncio.to_thread, self._tokenizing.close)
            stack.push_async_callback(self._built.server.stop, None)
            authenticator = access.authenticator
            parts = Parts(config, self._built.shared, authenticator, metrics, self._why_not_ready)
            exporter: HttpFront | None = None
            if config.port is not None:
                front = HttpFront(api(parts), config, listening=self._listening)
                self._front = await self._started(front, access.tls, stack)
            if metrics.models and not config.metrics_on_api:
                pages = pages_of(metrics, self._why_not_ready, lambda: self._models.retry_seconds)
                app: ASGIApp = Starlette(routes=page_routes(pages))
                if config.page:
                    app = playground(parts, pages)
                exporter = HttpFront(app, config, "metrics_port")
                await self._started(exporter, access.tls if config.page else None, stack)
            await self._built.server.start()
            if config.log_stats:
                several = len([*self._models]) > 1
                for model in self._models:
                    status = write_status(model.supervisor, name=model.name if several else "")
                    stack.callback(asyncio.create_task(status, name="status-log").cancel)
            await self._serve(exporter)

    async def _started(
        self, front: HttpFront, tls: Tls | None, stack: contextlib.AsyncExitStack
    ) -> HttpFront:
        """Starts listening; with TLS, new certificates are used after reloads."""
        await front.start(None if tls is None else tls.context)
        stack.push_async_callback(front.close)
        if tls is not None:
            self.reloads.append(lambda: self._background(front.reload(tls.context)))
        return front

    async def _serve(self, exporter: HttpFront | None) -> None:
        """Serves until a signal arrives and everything has ended."""
        stop = stop_signal(self._reload)
        starting = asyncio.create_task(self._models.start())
        either: list[asyncio.Future[Any]] = [starting, stop]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            # without what the start made, a full collection takes a millisecond, not 70, between two tokens
            gc.collect()
            gc.freeze()
            self._print_ready(exporter)
            number = await stop
            self._stopping = True
            if number == signal.SIGTERM:
                await self._lame_duck()
        else:
            starting.cancel()
            await asyncio.wait([starting])
        await self._drain()

    async def _lame_duck(self) -> None:
        """Health reports NOT_SERVING, but requests are still answered, so that load balancers can notice."""
        seconds = self._config.lame_duck_seconds
        if self._models.serving and self._config.drain_seconds and seconds:
            log.info("stopping: not serving, but accepting requests for %g s more", seconds)
            self._models.retire()
            await asyncio.sleep(seconds)

    def _reload(self) -> None:
        if not self.reloads:
            log.info("SIGHUP: there is nothing to reload")
        for reload in self.reloads:
            reload()

    async def _drain(self) -> None:
        """Rejects new requests, gives running ones time to finish, then aborts them."""
        self._stopping = True
        seconds = self._config.drain_seconds
        log.info("stopping: requests in flight have %g s", seconds)
        # accepts nothing from now on
        stopping = asyncio.create_task(self._built.server.stop(seconds + 2 * FLUSH_SECONDS))
        if self._front is not None:
            self._front.drain()
        await self._models.close(seconds)
        ending: list[asyncio.Future[Any]] = [stopping]
        if self._front is not None:
            ending.append(asyncio.create_task(self._front.close(FLUSH_SECONDS)))
        await asyncio.wait(ending, timeout=FLUSH_SECONDS)
        await self._built.server.stop(None)  # clients that still watch health, or do not read
        await stopping
        log.info("stopped")

    # --- status ------------------------------------------------------------------------------------

    def _changed(self, serving: bool) -> None:
        """Called when a model starts or stops answering."""
        self._background(self._show_health())
        if serving:
            self._background(self._warm_up())

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._showing.add(task)
        task.add_done_callback(self._showing.discard)

    async def _show_health(self) -> None:
        status = HealthCheckResponse.SERVING if self._models.serving else HealthCheckResponse.NOT_SERVING
        for service in ("", *self._built.services):
            await self._built.health.set(service, status)

    async def _warm_up(self) -> None:
        """Starts the processes that render conversations."""
        for llm in self._models.running():
            await self._built.shared.sandbox.warm_up(llm.tokenizer)

    def _why_not_ready(self) -> str | None:
        """The reason shown by /readyz; None if the model answers."""
        if self._stopping:
            return "stopping: new requests should go elsewhere"
        return None if self._models.serving else self._models.default.supervisor.why_not_ready

    def _print_ready(self, exporter: HttpFront | None) -> None:
        """Prints the only lines on stdout."""
        supervisor = self._models.default.supervisor
        config, info, engine = self._config, supervisor.info, supervisor.engine.info
        limits, load = info.limits, supervisor.load
        host = f"[{config.host}]" if ":" in config.host.strip("[]") else config.host
        scheme = "http" if config.tls_cert is None else "https"
        seconds = time.monotonic() - self._begun
        parts = [f"jengine: serving {info.name}"]
        if self._front is not None:
            parts.append(f"OpenAI's API on {scheme}://{host}:{self._front.port}/v1")
        if self._built.port is not None:
            parts.append(f"gRPC on {host}:{self._built.port}")
        parts += [
            f"{limits.sequence.max_model_len} tokens a sequence, {limits.max_num_seqs} sequences at once",
            (
                f"ready in {seconds:.1f} s, {engine.programs_compiled} programs compiled,"
                f" {engine.programs_loaded} loaded"
            ),
        ]
        if load.programs_ready < load.programs:
            parts[-1] += f", {load.programs - load.programs_ready} to follow"
        if config.metrics_on_api:
            parts.append(f"metrics on {scheme}://{host}:{config.metrics_port}/metrics")
        if exporter is not None:
            address = f"{scheme if config.page else 'http'}://{host}:{exporter.port}"
            parts.append(f"metrics on {address}/metrics")
            if config.page:
                parts.append(f"page on {address}/")
        if others := [model.name for model in self._models][1:]:
            log.info("loaded when a request names them: %s", ", ".join(others))
        if not sys.stderr.isatty():
            log.info("ready in %.1f s", seconds)
        if engine.kernels:
            log.info("kernels: %s", engine.kernels)
        if engine.advice:
            log.info("%s", engine.advice)
        print("; ".join(parts), flush=True)
        if self._front is not None and config.tls_cert is None:
            key = None if config.api_key is None and config.api_keys is None else "$JENGINE_API_KEY"
            here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
            print(curl(f"http://{here}:{self._front.port}/v1", info, key), flush=True)


def curl(base: str, info: ModelInfo, key: str | None) -> str:
    """A command that asks the model something. `key`: what stands for an API key in it, if it needs one."""
    path, fields = "/completions", dict[str, Any](prompt="Once upon a time")
    if info.has_chat_template:
        path, fields = "/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    body = msgspec.json.encode({"model": info.name, **fields}).decode()
    header = "" if key is None else f' -H "Authorization: Bearer {key}"'
    return f"curl {base}{path} -H 'Content-Type: application/json'{header} -d {shlex.quote(body)}"
