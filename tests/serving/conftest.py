"""A server with a mock engine, in a thread of this process, and a channel to it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from jengine import AsyncLLM, SamplingParams, Tokenizer
from jengine.api.backend import EngineThread
from jengine.serving.calls.model_provider import NO_PAGES, FixedModel, ModelInfo, PagesInfo
from jengine.serving.config import ServerConfig
from jengine.serving.grpc.client_messages import GenerateServiceStub
from jengine.serving.grpc.server import AddedService, build_server
from jengine.serving.guards.access import Access
from jengine.serving.http.app import api
from jengine.serving.http.endpoint import Parts
from jengine.serving.http.front import HttpFront
from jengine.serving.logs import RequestLog
from jengine.serving.metrics import server_metrics
from jengine.serving.metrics.model_metrics import ModelMetrics
from jengine.serving.metrics.server_metrics import Metrics, pages_of
from jengine.serving.playground.app import playground
from tests.mocks.mock_engine import MockEngine
from tests.text.conftest import byte_level, write

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}<s>assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True)
class MockServer:
    address: str
    llm: AsyncLLM
    engine: MockEngine
    run: Callable[..., Any]  # a coroutine, in the server's event loop
    metrics: Metrics
    http: str = ""  # with server={"port": 0}: the base of OpenAI's paths
    page: str = ""  # with server={"metrics_port": 0, "page": True}: the playground's address

    @contextmanager
    def stub(self, key: str | None = None) -> Iterator[GenerateServiceStub]:
        """A stub that sends this API key, if any."""
        with grpc.insecure_channel(self.address) as channel:
            yield GenerateServiceStub(channel if key is None else with_key(channel, key))

    def wait_until_idle(self) -> None:
        """Waits until nothing runs or waits, no client is remembered, and all pages are free."""
        until = time.monotonic() + 60
        while (
            self.engine.has_work
            or self.llm._requests._handles
            or self.engine.load.free_pages != self.engine.load.pages
        ):
            assert time.monotonic() < until, self.engine.load
            time.sleep(0.002)


class _WithKey(
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor
):  # type: ignore[misc]
    def __init__(self, key: str) -> None:
        self._metadata = [("authorization", f"Bearer {key}")]

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=[*(details.metadata or ()), *self._metadata]), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _call


def with_key(channel: grpc.Channel, key: str) -> grpc.Channel:
    return grpc.intercept_channel(channel, _WithKey(key))


server_metrics.KEEP_FACTOR = 0  # tests read metrics right after what they count
MakeServer = Callable[..., AbstractContextManager[MockServer]]


@contextmanager
def serve_mock(
    folder: Path,
    *,
    name: str = "mock",
    server: dict[str, Any] | None = None,
    defaults: SamplingParams | None = None,
    exchange: PagesInfo = NO_PAGES,
    services: Sequence[AddedService] = (),
    **engine_options: Any,
) -> Iterator[MockServer]:
    """`serve_mock` takes options of ServerConfig and MockEngine, the model's name, its default sampling
    parameters, how it says that it exchanges pages, and services of integrations.
    """
    engine = MockEngine(**{"vocab_size": 501, **engine_options})
    info = ModelInfo(
        name=name,
        limits=engine.limits,
        dtype="float32",
        devices="1 mock",
        mesh={"tensor": 1},
        kernels="none",
        has_chat_template=True,
        pages=exchange,
    )
    metrics = Metrics(ModelMetrics(name, lambda: engine.load, lambda: 0))
    started, box = threading.Event(), []

    async def main() -> None:
        llm = AsyncLLM.over(EngineThread(engine), Tokenizer.load(folder), defaults)
        config = ServerConfig(**{"grpc_port": 0, "port": None, **(server or {})})
        access = Access(config, metrics)
        request_log = None if config.request_log is None else RequestLog(config.request_log)
        built = await build_server(
            config,
            FixedModel(llm, info),
            metrics=metrics,
            request_log=request_log,
            interceptors=access.interceptors,
            services=services,
        )
        await built.server.start()
        parts = Parts(config, built.shared, access.authenticator, metrics, lambda: None)
        fronts, addresses = [], ["", ""]
        if config.port is not None:
            fronts.append(HttpFront(api(parts), config))
            await fronts[-1].start(None)
            addresses[0] = f"http://127.0.0.1:{fronts[-1].port}/v1"
        if config.page:
            fronts.append(
                HttpFront(playground(parts, pages_of(metrics, lambda: None)), config, "metrics_port")
            )
            await fronts[-1].start(None)
            addresses[1] = f"http://127.0.0.1:{fronts[-1].port}"
        for service in ("", *built.services):
            await built.health.set(service, HealthCheckResponse.SERVING)
        stop = asyncio.Event()
        box.extend((asyncio.get_running_loop(), llm, built.port, addresses, stop))
        started.set()
        await stop.wait()
        await llm.close()
        for front in fronts:
            await front.close(1.0)
        await built.server.stop(None)
        if request_log is not None:
            request_log.close()
        built.shared.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(10), "no server"
    loop, llm, port, addresses, stop = box
    try:
        yield MockServer(
            f"127.0.0.1:{port}",
            llm,
            engine,
            lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(10),
            metrics,
            *addresses,
        )
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """Each call of httpx without a client would read all public certificates, with or without TLS: 40 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 501 tokens, with a chat template."""
    folder: Path = write(byte_level(), tmp_path_factory.mktemp("tokenizer"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def make_server(tokenizer_folder: Path) -> MakeServer:
    """make_server(server={option: value}, **engine_options), a context manager."""
    return partial(serve_mock, tokenizer_folder)


@pytest.fixture
def mock_server(make_server: MakeServer) -> Iterator[MockServer]:
    with make_server() as server:
        yield server
        server.wait_until_idle()


@pytest.fixture
def channel(mock_server: MockServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(mock_server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> GenerateServiceStub:
    return GenerateServiceStub(channel)
