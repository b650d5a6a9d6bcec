"""The gRPC server, and its service jengine.v1.GenerateService."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jengine import InvalidArgument, ProfileOptions, TokensPrompt, Trace, __version__
from jengine import Profile as TakenProfile
from jengine.serving.calls.call import rpc_kind
from jengine.serving.calls.errors import parser, reported
from jengine.serving.calls.model_provider import ServedModels
from jengine.serving.calls.named_model import NamedModel, named_model
from jengine.serving.config import ServerConfig
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc import conversions
from jengine.serving.guards.admission import (
    CallInterceptor,
    allowed_priority,
    check_admin,
    client_of,
    sees_all_clients,
)
from jengine.serving.guards.security import scoped
from jengine.serving.logs import RequestLog
from jengine.serving.metrics.server_metrics import Metrics
from jengine.serving.requests.answers import Answer, PatientWriter
from jengine.serving.requests.lora_changes import LoraChanges
from jengine.serving.requests.service import (
    Conversation,
    ParsedRequest,
    Service,
    Shared,
    check_ids,
    check_vocabulary,
)
from jengine.serving.requests.tracking import Spans, TrackedRequest
from jengine.spi import (
    GenerationParams,
    OutputKind,
    UnloadLora,
    capture_process,
    decode_operation,
    read_profiles,
)

DEFAULT_PORT = 50051
log = logging.getLogger("jengine.serving")

Prompted = pb.GenerateRequest | pb.ChatRequest
STREAM = {"final": "", "delta": "Stream"}  # end of the RPC's name: Chat and Generate share a handler


class GenerateService(Service):
    """jengine's own service."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._lora_changes = LoraChanges(shared.config, shared.models)

    # --- generation -------------------------------------------------------------------------------

    @reported
    async def Generate(self, request: Prompted, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        async with self._queued(request, context, "final") as (answer, model):
            return await conversions.response(await answer.next(), model.name, self._shared.portions)

    @reported
    async def GenerateStream(self, request: Prompted, context: grpc.aio.ServicerContext) -> None:
        async with self._queued(request, context, "delta") as (answer, model):
            write = PatientWriter(context, self._config.write_timeout, answer).write
            begun = pb.Started(request_id=answer.request.request_id, model=model.name)
            await write(pb.GenerateStreamResponse(started=begun))
            output = await answer.next()
            prompt_logprobs, tokens = output.prompt_logprobs, 0
            while True:
                for completion in output.outputs:
                    tokens += len(completion.token_ids)
                    for delta in conversions.deltas(completion):
                        await write(delta)
                if output.finished:
                    break
                output = await answer.next()
            end = await conversions.finished(output, tokens, prompt_logprobs, self._shared.portions)
            await write(end)

    Chat, ChatStream = Generate, GenerateStream

    @asynccontextmanager
    async def _queued(
        self, request: Prompted, context: grpc.aio.ServicerContext, kind: OutputKind
    ) -> AsyncIterator[tuple[Answer, NamedModel]]:
        """A context in which a request waits or runs, in its place."""
        name = ("Chat" if isinstance(request, pb.ChatRequest) else "Generate") + STREAM[kind]
        with self._tracker.track(name, request.request_id, context) as tracked:
            params, model = await self._admit(request, context, tracked)
            with self._admission.place(params.n, context) as tracked.place:
                parsed = await self._parsed(request, params, model, context)
                with await self._submit(model, parsed, kind, context, tracked, "all") as answer:
                    yield answer, model

    async def _admit(
        self, request: Prompted, context: grpc.aio.ServicerContext, tracked: TrackedRequest
    ) -> tuple[GenerationParams, NamedModel]:
        self._admission.stream(context)
        if isinstance(request, pb.ChatRequest):
            conversions.check_messages(request.messages)
        allowed_priority(request.priority or None)  # before anything is done
        model = await named_model(request.model, self._models, context)
        tracked.uses(model)
        defaults = self._bounds.default(model.llm.get_default_sampling_params())
        return self._bounds.params(conversions.to_params(request.sampling_params, defaults)), model

    async def _parsed(
        self,
        request: Prompted,
        params: GenerationParams,
        model: NamedModel,
        context: grpc.aio.ServicerContext,
    ) -> ParsedRequest:
        """A request whose conversation has been rendered, or whose images have been read."""
        prompt: Callable[[], TokensPrompt | dict[str, Any]]
        if isinstance(request, pb.ChatRequest):
            template = request.options.chat_template if request.options.HasField("chat_template") else None
            rendered = await self._render(
                model, partial(_conversation_of, request), template, request.ByteSize(), context
            )
            prompt = lambda: rendered  # noqa: E731
        else:
            prompt = partial(_prompt_of, request, model, await self._images(request, model, context))
        return ParsedRequest(
            params,
            prompt,
            request.ByteSize(),
            request.cache_salt if request.HasField("cache_salt") else None,
            allowed_priority(request.priority or None),
            request.timeout_seconds if request.HasField("timeout_seconds") else None,
            request.ttft_ms if request.HasField("ttft_ms") else None,
            request.tpot_ms if request.HasField("tpot_ms") else None,
        )

    async def _images(
        self, request: pb.GenerateRequest, model: NamedModel, context: grpc.aio.ServicerContext
    ) -> dict[str, Any]:
        """The images of a prompt, as its further fields; none if it has neither images nor their options."""
        has_options = request.HasField("mm_processor_kwargs_json")
        if not request.images and not has_options:
            return {}
        asked = conversions.to_processing(request.mm_processor_kwargs_json) if has_options else {}
        images = conversions.to_images(request.images)
        reader_options = model.tokenizer, "images", asked
        read = await self._shared.images.read(client_of(context), images, *reader_options) if images else []
        return {"multi_modal_data": {"image": read}, "mm_processor_kwargs": asked}

    # --- the rest ---------------------------------------------------------------------------------

    @reported
    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        request_id = scoped(request.request_id)
        aborted = [await llm.abort(request_id) for llm in self._models.running()]
        return pb.AbortResponse(found=any(aborted))

    @reported
    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        self._admission.stream(context)
        model = await named_model(request.model, self._models, context)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        encode = partial(model.llm.tokenizer.encode, request.text, special)
        ids = await self._text_work.run(client_of(context), request.ByteSize(), encode)
        return pb.TokenizeResponse(token_ids=ids)

    @reported
    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        self._admission.stream(context)
        model = await named_model(request.model, self._models, context)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        check_ids("token_ids", len(request.token_ids), model)
        check_vocabulary("token_ids", request.token_ids, model)
        decode = partial(model.llm.tokenizer.decode_unlocked, list(request.token_ids), skip)
        text = await self._text_work.run(client_of(context), request.ByteSize(), decode)
        return pb.DetokenizeResponse(text=text)

    @reported
    async def GetModel(
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelResponse:
        info = self._models.info
        limits, room = info.limits, info.limits.sequence
        return pb.GetModelResponse(
            name=info.name,
            max_model_len=room.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            dtype=info.dtype,
            quantization=info.quantization,
            devices=info.devices,
            mesh=info.mesh,
            page_size=room.page_size,
            pages=room.pages,
            has_chat_template=info.has_chat_template,
            jengine_version=__version__,
            adapters=[
                pb.Adapter(name=adapter.module.name, has_chat_template=bool(adapter.tokenizer.chat_templates))
                for adapter in self._models.adapters
            ],
        )

    @reported
    async def GetLoad(
        self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadResponse:
        return conversions.load(self._models.llm.load, counters=sees_all_clients())

    @reported
    async def Do(self, request: pb.DoRequest, context: grpc.aio.ServicerContext) -> pb.DoResponse:
        check_admin(context.peer())
        operation = decode_operation(
            request.operation, request.arguments_json or "{}", remote=True, rollout=self._config.rollout_api
        )
        if isinstance(operation, UnloadLora):  # the server knows adapters, too
            await self._lora_changes.unload(context, operation.name)
            return pb.DoResponse(answer_json="null")
        log.info("%s has the engine do %s", client_of(context), request.operation)
        answer = await self._models.llm.do(operation)
        if isinstance(answer, Trace):  # the server knows who reads
            answer.readers = self._pace.readers()
        encoded = await asyncio.to_thread(msgspec.json.encode, answer)
        return pb.DoResponse(answer_json=encoded.decode())

    @reported
    async def Profile(
        self, request: pb.ProfileRequest, context: grpc.aio.ServicerContext
    ) -> pb.ProfileResponse:
        check_admin(context.peer())
        options = ProfileOptions(**{field.name: value for field, value in request.ListFields()})
        log.info("%s takes a profile of %g s", client_of(context), options.seconds)
        ended = threading.Event()
        taking = asyncio.ensure_future(self._profiled(options, ended))
        # there may be no one left to read it
        taking.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            profile, jax = await asyncio.shield(taking)
        finally:
            ended.set()  # the caller has disconnected, or the server is stopping
        return pb.ProfileResponse(profile=await asyncio.to_thread(profile.to_json), jax_capture=jax)

    async def _profiled(self, options: ProfileOptions, ended: threading.Event) -> tuple[TakenProfile, bytes]:
        """Profiles the engine's process and this one at the same time; this one at most until `ended`."""
        with tempfile.TemporaryDirectory() as name:
            engine, server = Path(name) / "engine", Path(name) / "server"
            both = (
                self._models.llm.profile(options, engine),
                asyncio.to_thread(capture_process, "server", options, server, ended.wait),
            )
            for failed in await asyncio.gather(*both, return_exceptions=True):
                if failed is not None:
                    raise failed
            return await asyncio.to_thread(
                read_profiles, self._models.info.name, (engine, server), self._pace.readers()
            )


def _prompt_of(request: pb.GenerateRequest, model: NamedModel, images: dict[str, Any]) -> dict[str, Any]:
    if (kind := request.WhichOneof("prompt")) is None:
        raise InvalidArgument("prompt", None, "must not be empty")
    if kind == "text":
        return {"prompt": str(request.text), **images}
    check_ids("prompt_token_ids", len(request.token_ids.ids), model)
    return {"prompt_token_ids": list(request.token_ids.ids), **images}


def _conversation_of(request: pb.ChatRequest) -> Conversation:
    return conversions.to_messages(request.messages), conversions.to_options(request.options)


DESCRIPTOR = pb.DESCRIPTOR.services_by_name["GenerateService"]
# Makes a service of another protocol, which has the server's parts and health.
AddedService = Callable[[Shared, health.aio.HealthServicer], tuple[ServiceDescriptor, object]]


class BuiltServer(NamedTuple):
    """A server that has not been started. Close `shared` after it has stopped.

    Its health is NOT_SERVING, for "" and each of its services, until it is set.

    Attributes:
        services: their full names.
        port: on which it listens; None: on none.
        shared: for services of other protocols.
    """

    server: grpc.aio.Server
    health: health.aio.HealthServicer
    services: tuple[str, ...]
    port: int | None
    shared: Shared


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
    shared = Shared.of(config, models, metrics, request_log, spans)
    server = grpc.aio.server(
        interceptors=[*interceptors, CallInterceptor(shared.admission)],
        options=_options(config, shared.admission.most_calls),
    )
    state = health.aio.HealthServicer()
    servicers: list[tuple[ServiceDescriptor, object]] = [(DESCRIPTOR, GenerateService(shared))]
    servicers += [make(shared, state) for make in services]
    for service, servicer in servicers:
        _add(service, servicer, server)
    names = tuple(service.full_name for service, _ in servicers)
    for name in ("", *names):
        await state.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = None if config.grpc_port is None else _bind(server, config, credentials)
    return BuiltServer(server, state, names, port, shared)


def _bind(
    server: grpc.aio.Server, config: ServerConfig, credentials: grpc.ServerCredentials | None
) -> int | None:
    """Binds the server to config's address. Returns the port; None if gRPC is off since it is in use."""
    host = f"[{config.host}]" if ":" in config.host.strip("[]") else config.host
    number = DEFAULT_PORT if config.grpc_port == "auto" else config.grpc_port
    address = f"{host}:{number}"
    try:
        return int(
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
    except RuntimeError:
        why = f"cannot listen on {address}: {_why_not(config.host, number)}"
        if config.grpc_port == "auto" and config.port is not None and not config.smg_api:
            log.warning("gRPC is off: it %s; --grpc-port sets another", why)
            return None
        raise InvalidArgument("grpc_port", number, f"{why}; give another one, or none") from None


def _is_news(record: logging.LogRecord) -> bool:
    """Whether gRPC's log record is more than a client that left while its answer was being sent."""
    return record.exc_info is None or not isinstance(record.exc_info[1], grpc.aio.InternalError)


def _add(service: ServiceDescriptor, servicer: object, server: grpc.aio.Server) -> None:
    """Like the generated code, but with our parser."""
    handlers = {}
    for method in service.methods:
        kind = rpc_kind(method.client_streaming, method.server_streaming)
        handlers[method.name] = getattr(grpc, f"{kind}_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=parser(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_registered_method_handlers(service.full_name, handlers)


def _why_not(host: str, port: int | str | None) -> str:
    """The reason, which gRPC does not report, found by trying to bind again."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
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
