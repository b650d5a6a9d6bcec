"""jengine.v1.GenerateService: text, conversations and tokens over the wire."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc

from jengine import AsyncLLM, InvalidArgument, SamplingParams, __version__
from jengine.serving import conversions
from jengine.serving.admission import Admission, check_texts, client_of
from jengine.serving.answers import Answer, Outputs, PatientWriter, give_up, in_thread_if_long, new_id, tokenized
from jengine.serving.bounds import RequestBounds, check_priority
from jengine.serving.errors import check_model, reported
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.generated.jengine.v1.generate_pb2_grpc import GenerateServiceServicer
from jengine.serving.model_provider import ModelProvider
from jengine.serving.sandbox import Sandbox
from jengine.serving.security import scoped
from jengine.serving.tracking import RequestTracker, TrackedRequest

Prompted = pb.GenerateRequest | pb.ChatRequest


class GenerateService(GenerateServiceServicer):
    """Every method may refuse with the statuses of jengine.serving.errors.

    Args:
        sandbox: where grammars are checked, and clients' chat templates rendered.
        write_timeout: seconds in which a client must take each message of a stream.
        client_chat_templates: whether clients may send chat templates of their own.
    """

    def __init__(
        self,
        models: ModelProvider,
        admission: Admission,
        tracker: RequestTracker,
        bounds: RequestBounds,
        sandbox: Sandbox,
        write_timeout: float,
        client_chat_templates: bool,
    ) -> None:
        self._models, self._admission, self._tracker, self._bounds = models, admission, tracker, bounds
        self._sandbox, self._write_timeout, self._client_chat_templates = sandbox, write_timeout, client_chat_templates

    # --- generation -------------------------------------------------------------------------------

    @reported
    async def Generate(self, request: Prompted, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        with self._tracker.track(_method(request, ""), request.request_id or new_id(), context) as tracked:
            return await self._whole(request, context, tracked)

    @reported
    async def GenerateStream(self, request: Prompted, context: grpc.aio.ServicerContext) -> None:
        with self._tracker.track(_method(request, "Stream"), request.request_id or new_id(), context) as tracked:
            await self._streamed(request, context, tracked)

    async def _whole(self, request: Prompted, context: grpc.aio.ServicerContext, tracked: TrackedRequest) -> pb.GenerateResponse:
        llm, params = self._let_in(request, context)
        with self._admission.place(params.n, context) as tracked.place:
            request_id = scoped(tracked.request_id)
            outputs = await self._submit(llm, request, params, request_id, "final", context)
            async with Answer(llm, request_id, outputs, tracked) as answer:
                return conversions.response(await answer.next(), self._models.info.name)

    async def _streamed(self, request: Prompted, context: grpc.aio.ServicerContext, tracked: TrackedRequest) -> None:
        llm, params = self._let_in(request, context)
        with self._admission.place(params.n, context) as tracked.place:
            request_id = scoped(tracked.request_id)
            outputs = await self._submit(llm, request, params, request_id, "delta", context)
            async with Answer(llm, request_id, outputs, tracked) as answer:
                write = PatientWriter(context, self._write_timeout, partial(give_up, llm, request_id, tracked.place)).write
                await write(conversions.started(tracked.request_id, self._models.info.name))
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
                await write(conversions.finished(output, tokens, prompt_logprobs))

    Chat, ChatStream = Generate, GenerateStream

    def _let_in(self, request: Prompted, context: grpc.aio.ServicerContext) -> tuple[AsyncLLM, SamplingParams]:
        self._admission.stream(context)
        check_model(request.model, self._models)
        llm = self._models.llm
        params = self._bounds.params(conversions.to_params(request.sampling_params, llm.get_default_sampling_params()))
        check_texts(params)
        check_priority(request.priority)
        return llm, params

    async def _submit(
        self,
        llm: AsyncLLM,
        request: Prompted,
        params: SamplingParams,
        request_id: str,
        kind: str,
        context: grpc.aio.ServicerContext,
    ) -> Outputs:
        """What is wrong with the request shows here, or when outputs are first asked for."""
        await self._sandbox.check(client_of(context), params.structured_outputs, llm.tokenizer)
        options: dict[str, Any] = {
            "request_id": request_id,
            "priority": request.priority,
            "timeout": self._bounds.timeout(request.timeout_seconds if request.HasField("timeout_seconds") else None),
            "output_kind": kind,
        }
        if isinstance(request, pb.ChatRequest):
            messages, chat = conversions.to_messages(request.messages), conversions.to_options(request.options)
            if "chat_template" in chat and not self._client_chat_templates:
                raise InvalidArgument("chat_template", chat["chat_template"], "this server takes no templates from its clients")
            if "chat_template" in chat:
                return llm.generate(await self._sandbox.render(client_of(context), messages, chat, llm.tokenizer), params, **options)
            return await in_thread_if_long(request.ByteSize(), partial(llm.chat, messages, params, **options, **chat))
        if request.WhichOneof("prompt") == "token_ids":
            return llm.generate(list(request.token_ids.ids), params, **options)
        return llm.generate(await tokenized(llm, request.text), params, **options)

    # --- the rest ---------------------------------------------------------------------------------

    @reported
    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(found=await self._models.llm.abort(scoped(request.request_id)))

    @reported
    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        self._admission.stream(context)
        check_model(request.model, self._models)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        ids = await in_thread_if_long(len(request.text), partial(self._models.llm.tokenizer.encode, request.text, special))
        return pb.TokenizeResponse(token_ids=ids)

    @reported
    async def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        self._admission.stream(context)
        check_model(request.model, self._models)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await in_thread_if_long(len(request.token_ids), partial(self._models.llm.tokenizer.decode, list(request.token_ids), skip))
        return pb.DetokenizeResponse(text=text)

    @reported
    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
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
        )

    @reported
    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        load = self._models.llm.load
        return pb.GetLoadResponse(
            running=load.running, waiting=load.waiting, free_pages=load.free_pages, pages=load.pages, preemptions=load.preemptions
        )


def _method(request: Prompted, stream: str) -> str:
    """The RPC's name: Chat and Generate have one handler."""
    return ("Chat" if isinstance(request, pb.ChatRequest) else "Generate") + stream
