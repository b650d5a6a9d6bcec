"""Builds the gRPC server from its services."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jengine import InvalidArgument
from jengine.serving.calls.errors import parser
from jengine.serving.calls.model_provider import ServedModels
from jengine.serving.config import ServerConfig
from jengine.serving.generated.jengine.v1 import generate_pb2
from jengine.serving.grpc.generate_service import GenerateService
from jengine.serving.guards.admission import CallInterceptor, ClientCalls
from jengine.serving.logs.request_log import RequestLog
from jengine.serving.metrics.server_metrics import Metrics
from jengine.serving.requests.service import Shared
from jengine.serving.requests.tracking import Spans

DESCRIPTOR = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"]
# Makes a service of another protocol, which has the server's parts and health.
AddedService = Callable[[Shared, health.aio.HealthServicer], tuple[ServiceDescriptor, object]]


class BuiltServer(NamedTuple):
    """A server that has not been started. Close `shared` after it has stopped.

    Its health is NOT_SERVING, for "" and each of its services, until it is set.

    Attributes:
        services: their full names.
        port: on which it listens; None: on none.
        shared, calls: for services of other protocols.
    """

    server: grpc.aio.Server
    health: health.aio.HealthServicer
    services: tuple[str, ...]
    port: int | None
    shared: Shared
    calls: ClientCalls


async def build_server(
    config: ServerConfig,
    models: ServedModels,
    *,
    metrics: Metrics | None = None,
    request_log: RequestLog | None = None,
    spans: Spans | None = None,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    services: Sequence[AddedService] = (),
) -> BuiltServer:
    """Builds a server bound to config's address. Must be called in the event loop in which it will run.

    Args:
        services: beside jengine's.

    Raises:
        InvalidArgument: the address is not available.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
    metrics = metrics or Metrics()
    calls = ClientCalls(config, metrics)
    server = grpc.aio.server(
        interceptors=[*interceptors, CallInterceptor(calls)], options=_options(config, calls.limit)
    )
    state = health.aio.HealthServicer()
    shared = Shared.of(config, models, metrics, request_log, spans)
    servicers: list[tuple[ServiceDescriptor, object]] = [(DESCRIPTOR, GenerateService(shared, config))]
    servicers += [make(shared, state) for make in services]
    for service, servicer in servicers:
        _add(service, servicer, server)
    names = tuple(service.full_name for service, _ in servicers)
    for name in ("", *names):
        await state.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = None if config.grpc_port is None else _bind(server, config, credentials)
    return BuiltServer(server, state, names, port, shared, calls)


def _bind(server: grpc.aio.Server, config: ServerConfig, credentials: grpc.ServerCredentials | None) -> int:
    """Binds the server to config's address. Returns the port."""
    host = f"[{config.host}]" if ":" in config.host.strip("[]") else config.host
    address = f"{host}:{config.grpc_port}"
    try:
        return int(
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except RuntimeError:
        limit = f"cannot listen on {address}: {_why_not(config)}; give another one, or none"
        raise InvalidArgument("grpc_port", config.grpc_port, limit) from None


def _is_news(record: logging.LogRecord) -> bool:
    """Whether gRPC's log record is more than a client that left while its answer was being sent."""
    return record.exc_info is None or not isinstance(record.exc_info[1], grpc.aio.InternalError)


def _add(service: ServiceDescriptor, servicer: object, server: grpc.aio.Server) -> None:
    """Like the generated code, but with our parser."""
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
    }
    handlers = {
        method.name: kinds[method.client_streaming, method.server_streaming](
            getattr(servicer, method.name),
            request_deserializer=parser(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in service.methods
    }
    server.add_registered_method_handlers(service.full_name, handlers)


def _why_not(config: ServerConfig) -> str:
    """The reason, which gRPC does not report, found by trying to bind again."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.host.strip("[]"), config.grpc_port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind(address)
            attempt.listen()
    except OSError as wrong:
        return wrong.strerror or str(wrong)
    return "gRPC does not say why"


def _options(config: ServerConfig, calls: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # computed results are always sent
        # per connection; a client's calls above `calls` get an error
        ("grpc.max_concurrent_streams", 2 * calls),
        ("grpc.max_allowed_incoming_connections", config.max_connections),  # further ones are closed
        ("grpc.so_reuseport", 0),  # a second server on this port must fail rather than share it
        # Pings detect clients that have vanished. Clients may also ping, to keep idle streams alive through
        # proxies.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
