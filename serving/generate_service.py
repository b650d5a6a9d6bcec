"""jengine.v1.GenerateService: text, conversations and tokens over the wire."""

from __future__ import annotations

import logging
from functools import partial

import grpc

from jengine import MAX_CLIENT, AsyncLLM, InvalidArgument, OutputKind, PreparedPrompt, RequestHandle, SamplingParams, __version__
from jengine.serving import conversions
from jengine.serving.admission import client_of
from jengine.serving.answers import Answer, PatientWriter, give_up, new_id
from jengine.serving.bounds import check_admin, check_priority, sees_all_clients
from jengine.serving.errors import check_model, reported
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.generated.jengine.v1.generate_pb2_grpc import GenerateServiceServicer
from jengine.serving.security import salted, scoped
from jengine.serving.service import Service, Shared
from jengine.serving.tracking import TrackedRequest

log = logging.getLogger("jengine.serving")

Prompted = pb.GenerateRequest | pb.ChatRequest


class GenerateService(Service, GenerateServiceServicer):
    """jengine's own service.

    Args:
        client_chat_templates: whether clients may send chat templates of their own.
    """

    def __init__(self, shared: Shared, client_chat_templates: bool) -> None:
        super().__init__(shared)
        self._client_chat_templates = client_chat_templates

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
            handle = await self._submit(llm, request, params, "final", context, tracked)
            with Answer(handle, tracked) as answer:
                return await conversions.response(await answer.next(), self._models.info.name)

    async def _streamed(self, request: Prompted, context: grpc.aio.ServicerContext, tracked: TrackedRequest) -> None:
        llm, params = self._let_in(request, context)
        with self._admission.place(params.n, context) as tracked.place:
            handle = await self._submit(llm, request, params, "delta", context, tracked)
            with Answer(handle, tracked) as answer:
                write = PatientWriter(context.write, context.peer, self._write_timeout, partial(give_up, handle, tracked.place)).write
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
                await write(await conversions.finished(output, tokens, prompt_logprobs))

    Chat, ChatStream = Generate, GenerateStream

    def _let_in(self, request: Prompted, context: grpc.aio.ServicerContext) -> tuple[AsyncLLM, SamplingParams]:
        self._admission.stream(context)
        check_model(request.model, self._models)
        if isinstance(request, pb.ChatRequest):
            conversions.check_messages(request.messages)
        llm = self._models.llm
        params = self._bounds.params(conversions.to_params(request.sampling_params, llm.get_default_sampling_params()))
        check_priority(request.priority)
        return llm, params

    async def _submit(
        self,
        llm: AsyncLLM,
        request: Prompted,
        params: SamplingParams,
        kind: OutputKind,
        context: grpc.aio.ServicerContext,
        tracked: TrackedRequest,
    ) -> RequestHandle:
        """Check and queue a request."""
        client = client_of(context)
        prepared = await self._prepare(llm, request, params, client)
        timeout = self._bounds.timeout(request.timeout_seconds if request.HasField("timeout_seconds") else None)
        request_id = scoped(tracked.request_id)
        try:
            return llm.submit(
                prepared,
                request_id=request_id,
                priority=request.priority,
                ttft_ms=request.ttft_ms if request.HasField("ttft_ms") else None,
                tpot_ms=request.tpot_ms if request.HasField("tpot_ms") else None,
                client=client[:MAX_CLIENT],
                timeout=timeout,
                output_kind=kind,
            )
        except InvalidArgument as wrong:
            raise wrong if wrong.field != "request_id" else InvalidArgument(wrong.field, tracked.request_id, wrong.limit) from None

    async def _prepare(self, llm: AsyncLLM, request: Prompted, params: SamplingParams, client: str) -> PreparedPrompt:
        """What takes long in a request happens in threads, what may go wrong in processes of the sandbox."""
        salt = salted(request.cache_salt if request.HasField("cache_salt") else None)  # here: threads do not know the key
        await self._sandbox.check(client, params.structured_outputs, llm.tokenizer)
        work = partial(self._text_work.run, client, request.ByteSize())
        if isinstance(request, pb.ChatRequest) and request.options.HasField("chat_template"):
            if not self._client_chat_templates:
                template = request.options.chat_template
                raise InvalidArgument("chat_template", template, "this server takes no templates from its clients")
            messages, chat = await work(lambda: (conversions.to_messages(request.messages), conversions.to_options(request.options)))
            ids = await self._sandbox.render(client, messages, chat, llm.tokenizer)
            return await work(partial(llm.prepare, {"prompt_token_ids": ids, "cache_salt": salt}, params))
        return await work(partial(self._prepare_here, llm, request, params, salt))

    def _prepare_here(self, llm: AsyncLLM, request: Prompted, params: SamplingParams, salt: str | None) -> PreparedPrompt:
        """In any thread."""
        if isinstance(request, pb.ChatRequest):
            options = conversions.to_options(request.options)
            return llm.prepare_chat(conversions.to_messages(request.messages), params, cache_salt=salt, **options)
        if request.WhichOneof("prompt") == "token_ids":
            self._check_ids("prompt_token_ids", len(request.token_ids.ids))
            return llm.prepare({"prompt_token_ids": list(request.token_ids.ids), "cache_salt": salt}, params)
        return llm.prepare({"prompt": request.text, "cache_salt": salt}, params)

    def _check_ids(self, field: str, count: int) -> None:
        """Before they are copied."""
        most = self._models.info.limits.sequence.max_model_len
        if count > most:
            raise InvalidArgument(field, f"{count} ids", f"at most max_model_len = {most}")

    # --- the rest ---------------------------------------------------------------------------------

    @reported
    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(found=await self._models.llm.abort(scoped(request.request_id)))

    @reported
    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        self._admission.stream(context)
        check_model(request.model, self._models)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        tokenizer = self._models.llm.tokenizer

        def tokenize() -> pb.TokenizeResponse:
            return pb.TokenizeResponse(token_ids=tokenizer.encode(request.text, special))

        answer: pb.TokenizeResponse = await self._text_work.run(client_of(context), request.ByteSize(), tokenize)
        return answer

    @reported
    async def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext) -> pb.DetokenizeResponse:
        self._admission.stream(context)
        check_model(request.model, self._models)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        self._check_ids("token_ids", len(request.token_ids))
        tokenizer = self._models.llm.tokenizer

        def detokenize() -> pb.DetokenizeResponse:
            return pb.DetokenizeResponse(text=tokenizer.decode_unlocked(list(request.token_ids), skip))

        answer: pb.DetokenizeResponse = await self._text_work.run(client_of(context), request.ByteSize(), detokenize)
        return answer

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
        return conversions.load(self._models.llm.load, counters=sees_all_clients())

    @reported
    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext) -> pb.ResetPrefixCacheResponse:
        check_admin(context.peer())
        done = await self._models.llm.reset_prefix_cache()
        log.info("%s has reset the prefix cache", client_of(context))
        return pb.ResetPrefixCacheResponse(done=done)

    @reported
    async def SetStrategy(self, request: pb.SetStrategyRequest, context: grpc.aio.ServicerContext) -> pb.SetStrategyResponse:
        check_admin(context.peer())
        self._models.llm.set_strategy(request.strategy)
        log.info("%s has set the strategy to %s", client_of(context), request.strategy)
        return pb.SetStrategyResponse()


def _method(request: Prompted, stream: str) -> str:
    """The RPC's name: Chat and Generate have one handler."""
    return ("Chat" if isinstance(request, pb.ChatRequest) else "Generate") + stream
