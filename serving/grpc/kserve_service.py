"""inference.GRPCInferenceService: the open inference protocol (KServe v2), for its clients. Text in, text
out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from jengine import JengineError, OutputKind, RequestHandle, RequestOutput, __version__
from jengine.serving.calls.errors import Refusal, checked, not_found, refusal, reported
from jengine.serving.calls.model_provider import ListedModel, User
from jengine.serving.calls.named_model import NamedModel, Using, listed_model, named_model
from jengine.serving.calls.overload import Busy, SlowReader
from jengine.serving.calls.request_ids import MAX_REQUEST_ID, new_id
from jengine.serving.generated.inference import grpc_service_pb2 as pb
from jengine.serving.generated.inference.grpc_service_pb2_grpc import GRPCInferenceServiceServicer
from jengine.serving.grpc import tensors
from jengine.serving.grpc.tensors import OUTPUTS, read_request, write_texts
from jengine.serving.guards.admission import Place
from jengine.serving.guards.bounds import check_priority
from jengine.serving.requests.answers import Answer, PatientWriter, abandon
from jengine.serving.requests.service import ParsedRequest, Service, Shared
from jengine.serving.requests.tracking import TrackedRequest

VERSION = "1"
MOST_AT_ONCE = 64  # concurrent requests in one stream; the next is read when one of them has ended


class KserveService(Service, GRPCInferenceServiceServicer):
    """The open inference protocol's service."""

    def __init__(self, shared: Shared, health: health.aio.HealthServicer) -> None:
        super().__init__(shared)
        self._health = health

    # --- what is here -----------------------------------------------------------------------------

    @reported
    async def ServerLive(
        self, request: pb.ServerLiveRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    @reported
    async def ServerReady(
        self, request: pb.ServerReadyRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=await self._ready(context))

    @reported
    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelReadyResponse:
        ready = await self._ready(context)
        known = request.version in ("", VERSION) and self._can_answer(request.name)
        return pb.ModelReadyResponse(ready=ready and known)

    @reported
    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="jengine", version=__version__)

    @reported
    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelMetadataResponse:
        _check_version(request.version)
        found = listed_model(request.name, self._models)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=found.name if isinstance(found, ListedModel) else found.module.name,
            versions=[VERSION],
            platform="jengine",
            inputs=[tensor(name="text_input", datatype="BYTES", shape=[1])],
            outputs=[tensor(name=name, datatype="BYTES", shape=[-1]) for name in OUTPUTS],
        )

    # --- generation -------------------------------------------------------------------------------

    @reported
    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelInferResponse:
        with self._tracker.track("ModelInfer", request.id, context) as tracked:
            self._admission.stream(context)
            parsed, model = await self._read(request, tracked, context)
            with self._admission.place(parsed.params.n, context) as tracked.place:
                handle = await self._queue(parsed, model, "final", context, tracked.place)
                with Answer(handle, tracked, aborts="asked for") as answer:
                    output = await answer.next()
                    tokens = sum(len(completion.token_ids) for completion in output.outputs)
                    return self._response(request, model.name, output, tokens)

    @reported
    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> None:
        self._admission.stream(context)
        stream = _Stream(context.write, context.peer, self._write_timeout)
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await stream.sequence.acquire()
                    tasks.create_task(self._answer_in(stream, request, context))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _answer_in(
        self, stream: _Stream, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Request errors are reported in the stream, which continues."""
        shown_id = "" if isinstance(request, bytes) else request.id
        try:
            with (
                self._tracker.track("ModelStreamInfer", shown_id, context) as tracked,
                Using.context() as user,  # the call may go on for long
            ):
                await self._stream_one(stream, request, context, tracked, user)
        except (JengineError, Refusal, Busy, SlowReader) as error:
            if stream.stalled:
                raise
            await stream.write(
                error_message=refusal(error).message,
                infer_response=pb.ModelInferResponse(id=shown_id[:MAX_REQUEST_ID]),
            )
        finally:
            stream.sequence.release()

    async def _stream_one(
        self,
        stream: _Stream,
        request: pb.ModelInferRequest,
        context: grpc.aio.ServicerContext,
        tracked: TrackedRequest,
        user: User,
    ) -> None:
        parsed, model = await self._read(request, tracked, user)
        with self._admission.place(parsed.params.n, context) as tracked.place:
            handle = await self._queue(parsed, model, "delta", context, tracked.place)
            with (
                Answer(handle, tracked, self._pace, "asked for") as answer,
                stream.freeing(handle.request_id, partial(abandon, handle, tracked.place)),
            ):
                ended, tokens = False, 0
                while not ended:
                    output = await answer.next()
                    ended, tokens = (
                        output.finished,
                        tokens + sum(len(completion.token_ids) for completion in output.outputs),
                    )
                    if ended or any(completion.text for completion in output.outputs):
                        await stream.write(infer_response=self._response(request, model.name, output, tokens))

    async def _queue(
        self,
        read: tensors.TensorRequest,
        model: NamedModel,
        kind: OutputKind,
        context: grpc.aio.ServicerContext,
        place: Place,
    ) -> RequestHandle:
        """Validates and queues a request."""
        more = read.cache_salt, read.priority, read.timeout, read.ttft_ms, read.tpot_ms
        parsed = ParsedRequest(read.params, lambda: read.text, read.bytes, *more)
        return await self._submit(model, parsed, kind, context, new_id(), place)

    async def _read(
        self, request: pb.ModelInferRequest, tracked: TrackedRequest, user: User
    ) -> tuple[tensors.TensorRequest, NamedModel]:
        checked(request)
        _check_version(request.model_version)
        model = await named_model(request.model_name, self._models, user)
        tracked.uses(model)
        parsed = read_request(request, model.llm.get_default_sampling_params())
        check_priority(parsed.priority)
        return parsed._replace(params=self._bounds.params(parsed.params)), model

    def _response(
        self, request: pb.ModelInferRequest, model: str, output: RequestOutput, tokens: int
    ) -> pb.ModelInferResponse:
        """The content of this output; `tokens`: number generated so far."""
        response = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=request.id)
        response.parameters["triton_final_response"].bool_param = output.finished
        if output.finished:
            response.parameters["prompt_tokens"].int64_param = len(output.prompt_token_ids)
            response.parameters["completion_tokens"].int64_param = tokens
            response.parameters["cached_prompt_tokens"].int64_param = output.num_cached_tokens or 0
        texts: dict[str, list[str]] = {
            "text_output": [completion.text for completion in output.outputs],
            "finish_reason": [completion.finish_reason or "" for completion in output.outputs],
        }
        for name in [requested.name for requested in request.outputs] or OUTPUTS:
            write_texts(response, name, texts[name], raw=bool(request.raw_input_contents))
        return response

    def _can_answer(self, name: str) -> bool:
        """Whether the model is loaded, or can be."""
        try:
            found = listed_model(name, self._models)
        except Refusal:
            return False
        return not isinstance(found, ListedModel) or found.status != "failed"

    async def _ready(self, context: grpc.aio.ServicerContext) -> bool:
        response = await self._health.Check(HealthCheckRequest(), context)
        return bool(response.status == HealthCheckResponse.SERVING)


def _check_version(version: str) -> None:
    if version not in ("", VERSION):
        raise not_found("model version", version, f"there is one version: {VERSION}")


class _Stream:
    """A stream of several requests: sends their responses one after the other, and tracks their resources.

    Attributes:
        room: limits concurrent requests.
        stalled: whether the client failed to read in time.
    """

    def __init__(
        self, write: Callable[[Any], Awaitable[object]], peer: Callable[[], str], write_timeout: float
    ) -> None:
        self.sequence, self.stalled = asyncio.Semaphore(MOST_AT_ONCE), False
        self._writer = PatientWriter(write, peer, write_timeout, self._stall)
        self._turn = asyncio.Lock()
        self._held: dict[str, Callable[[], None]] = {}  # functions that free requests, by id

    async def write(self, **fields: Any) -> None:
        async with self._turn:
            await self._writer.write(pb.ModelStreamInferResponse(**fields))

    @contextmanager
    def freeing(self, request_id: str, free: Callable[[], None]) -> Iterator[None]:
        """A context in which the request's resources are freed if the client does not read."""
        self._held[request_id] = free
        if self.stalled:
            free()
        try:
            yield
        finally:
            del self._held[request_id]

    def _stall(self) -> None:
        self.stalled = True
        for free in self._held.values():
            free()
