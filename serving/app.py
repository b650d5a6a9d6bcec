"""The server application: listen, start the engine, serve, drain, exit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable

import grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from serving.config import ServerConfig
from serving.engine_process import EngineProcess
from serving.metrics import Metrics, MetricsServer, OutcomeInterceptor, PrometheusMetrics
from serving.security import ApiKeys, KeyInterceptor, server_credentials, warn_of_plaintext
from serving.server import SERVICES, Built, build_server
from serving.supervisor import OnEnd, Supervisor

FLUSH_SECONDS = 1.0  # for last messages, after the last request has ended

log = logging.getLogger("serving")


def run(config: ServerConfig, model: str, make_engine: Callable[[OnEnd], EngineProcess]) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second SIGINT ends the process at once, with exit code 130.

    Args:
        model: its name, unless config has another.
        make_engine: as for Supervisor.

    Raises:
        InvalidArgument: a file that cannot be used, an address that cannot be had, an option that the model or device cannot meet.
        ModelError, OutOfMemory, EngineDead: the engine cannot start.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    log.setLevel(config.log_level.upper())
    asyncio.run(ServerApp(config, config.served_model_name or model, make_engine).live())


class ServerApp:
    """One server's. The arguments are those of `run`."""

    def __init__(self, config: ServerConfig, name: str, make_engine: Callable[[OnEnd], EngineProcess]) -> None:
        self._config, self._name, self._make_engine = config, name, make_engine
        self._begun, self._ready = time.monotonic(), False
        self._engine: EngineProcess
        self._built: Built
        self._supervisor = Supervisor(name, self._make, on_state=self._changed)
        self._showing: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        """From the first to the last."""
        config = self._config
        credentials = server_credentials(config)
        keys = None if config.api_keys is None else ApiKeys.load(config.api_keys)
        warn_of_plaintext(config)
        metrics = self._metrics()
        interceptors: list[grpc.aio.ServerInterceptor] = [OutcomeInterceptor(metrics)] if isinstance(metrics, PrometheusMetrics) else []
        interceptors += [] if keys is None else [KeyInterceptor(keys)]
        exporter = None
        self._built = await build_server(config, self._supervisor, metrics=metrics, credentials=credentials, interceptors=interceptors)
        try:
            if isinstance(metrics, PrometheusMetrics):
                assert config.metrics_port is not None
                exporter = MetricsServer(metrics, config.host, config.metrics_port)
            await self._built.server.start()
            await self._serve(exporter)
        finally:
            await self._built.server.stop(None)
            await asyncio.to_thread(self._built.sandbox.close)
            if exporter is not None:
                await asyncio.to_thread(exporter.close)

    async def _serve(self, exporter: MetricsServer | None) -> None:
        """Until a signal comes, and everything has ended."""
        stop = _stop_signal()
        starting = asyncio.create_task(self._supervisor.start())
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            self._say_ready(exporter)
            await waiting
        else:
            starting.cancel()
            await asyncio.wait([starting])
        await self._drain()

    async def _drain(self) -> None:
        """No new requests; time for those that run; then they are aborted, and told so."""
        seconds = self._config.drain_seconds
        log.info("stopping: requests in flight have %g s", seconds)
        stopping = asyncio.create_task(self._built.server.stop(seconds + 2 * FLUSH_SECONDS))  # accepts nothing from now on
        await self._supervisor.close(seconds)
        await asyncio.wait([stopping], timeout=FLUSH_SECONDS)
        await self._built.server.stop(None)  # who still watches health, or does not read
        await stopping
        log.info("stopped")

    # --- status ------------------------------------------------------------------------------------

    def _metrics(self) -> Metrics:
        if self._config.metrics_port is None:
            return Metrics()
        return PrometheusMetrics(self._name, lambda: self._supervisor.llm.load, lambda: self._supervisor.restarts)

    def _make(self, on_end: OnEnd) -> EngineProcess:
        self._engine = self._make_engine(on_end)
        return self._engine

    def _changed(self, serving: bool) -> None:
        """The model answers, or does so no more."""
        task = asyncio.get_running_loop().create_task(self._show_health())
        self._showing.add(task)
        task.add_done_callback(self._showing.discard)
        if serving and self._ready:
            log.info("the model answers again")

    async def _show_health(self) -> None:
        status = HealthCheckResponse.SERVING if self._supervisor.serving else HealthCheckResponse.NOT_SERVING
        for service in ("", *SERVICES):
            await self._built.health.set(service, status)

    def _say_ready(self, exporter: MetricsServer | None) -> None:
        """One line, the only one on stdout."""
        self._ready = True
        config, info, engine = self._config, self._supervisor.info, self._engine.info
        limits = info.limits
        host = f"[{config.host}]" if ":" in config.host else config.host
        seconds = time.monotonic() - self._begun
        parts = [
            f"{limits.sequence.max_model_len} tokens a sequence, {limits.max_num_seqs} sequences at once",
            f"ready in {seconds:.1f} s, {engine.programs_compiled} programs compiled, {engine.programs_loaded} loaded",
        ]
        if exporter is not None:
            parts.append(f"metrics on http://{host}:{exporter.port}/metrics")
        print(f"jengine: serving {info.name} on {host}:{self._built.port}; {'; '.join(parts)}", flush=True)


def _stop_signal() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def asked(number: int) -> None:
        stop.set()
        if number == signal.SIGINT:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, _leave)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)
    return stop


def _leave(*_: object) -> None:
    """At once: whatever is in flight is cut off, and the engine process ends when this one is gone."""
    os.write(sys.stderr.fileno(), b"\n")
    os._exit(130)
