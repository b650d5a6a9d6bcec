"""jengine.v1.GenerateService: text, conversations and tokens over the wire."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec

from jengine import InvalidArgument, ProfileOptions, RequestHandle, TokensPrompt, Trace, __version__
from jengine import Profile as TakenProfile
from jengine.serving.calls.errors import reported
from jengine.serving.calls.named_model import NamedModel, named_model
from jengine.serving.config import ServerConfig
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc import conversions
from jengine.serving.guards.admission import Place, client_of
from jengine.serving.guards.bounds import check_admin, check_priority, sees_all_clients
from jengine.serving.guards.security import scoped
from jengine.serving.requests.answers import Answer, PatientWriter, abandon
from jengine.serving.requests.lora_changes import LoraChanges
from jengine.serving.requests.service import (
    Conversation,
    ParsedRequest,
    Service,
    Shared,
    check_ids,
    check_vocabulary,
)
from jengine.serving.requests.tracking import TrackedRequest
from jengine.spi import (
    GenerationParams,
    OutputKind,
    UnloadLora,
    capture_process,
    decode_operation,
    read_profiles,
)

log = logging.getLogger("jengine.serving")

Prompted = pb.GenerateRequest | pb.ChatRequest


class GenerateService(Service):
    """jengine's own service."""

    def __init__(self, shared: Shared, config: ServerConfig) -> None:
        super().__init__(shared)
        self._lora_changes = LoraChanges(config, shared.models)

    # --- generation -------------------------------------------------------------------------------

    @reported
    async def Generate(self, request: Prompted, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        with self._tracker.track(_method(request, ""), request.request_id, context) as tracked:
            return await self._whole(request, context, tracked)

    @reported
    async def GenerateStream(self, request: Prompted, context: grpc.aio.ServicerContext) -> None:
        with self._tracker.track(_method(request, "Stream"), request.request_id, context) as tracked:
            await self._streamed(request, context, tracked)

    async def _whole(
        self, request: Prompted, context: grpc.aio.ServicerContext, tracked: TrackedRequest
    ) -> pb.GenerateResponse:
        params, model = await self._admit(request, context, tracked)
        with self._admission.place(params.n, context) as place:
            tracked.place = place
            asked = request, params, model
            handle = await self._queue(*asked, "final", context, tracked.request_id, place)
            with Answer(handle, tracked, aborts="all") as answer:
                return await conversions.response(
                    await answer.next(), model.name, self._shared.portions.answer()
                )

    async def _streamed(
        self, request: Prompted, context: grpc.aio.ServicerContext, tracked: TrackedRequest
    ) -> None:
        params, model = await self._admit(request, context, tracked)
        with self._admission.place(params.n, context) as place:
            tracked.place = place
            asked = request, params, model
            handle = await self._queue(*asked, "delta", context, tracked.request_id, place)
            with Answer(handle, tracked, self._pace, "all") as answer:
                write = PatientWriter(
                    context.write, context.peer, self._write_timeout, partial(abandon, handle, place)
                ).write
                await write(conversions.started(tracked.request_id, model.name))
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
                await write(
                    await conversions.finished(
                        output, tokens, prompt_logprobs, self._shared.portions.answer()
                    )
                )

    Chat, ChatStream = Generate, GenerateStream

    async def _admit(
        self, request: Prompted, context: grpc.aio.ServicerContext, tracked: TrackedRequest
    ) -> tuple[GenerationParams, NamedModel]:
        self._admission.stream(context)
        if isinstance(request, pb.ChatRequest):
            conversions.check_messages(request.messages)
        check_priority(request.priority)
        model = await named_model(request.model, self._models, context)
        tracked.uses(model)
        defaults = model.llm.get_default_sampling_params()
        return self._bounds.params(conversions.to_params(request.sampling_params, defaults)), model

    async def _queue(
        self,
        request: Prompted,
        params: GenerationParams,
        model: NamedModel,
        kind: OutputKind,
        context: grpc.aio.ServicerContext,
        request_id: str,
        place: Place,
    ) -> RequestHandle:
        """Validates and queues a request."""
        prompt: Callable[[], str | list[int] | TokensPrompt | dict[str, Any]] = partial(
            _prompt_of, request, model
        )
        if isinstance(request, pb.GenerateRequest) and (
            request.images or request.HasField("mm_processor_kwargs_json")
        ):
            prompt = partial(_with_images, request, model, await self._images(request, model, context))
        if isinstance(request, pb.ChatRequest):
            template = request.options.chat_template if request.options.HasField("chat_template") else None
            rendered = await self._render(
                model,
                partial(_conversation_of, request),
                template,
                request.ByteSize(),
                context,
            )
            prompt = lambda: rendered  # noqa: E731
        parsed = ParsedRequest(
            params,
            prompt,
            request.ByteSize(),
            request.cache_salt if request.HasField("cache_salt") else None,
            request.priority,
            request.timeout_seconds if request.HasField("timeout_seconds") else None,
            request.ttft_ms if request.HasField("ttft_ms") else None,
            request.tpot_ms if request.HasField("tpot_ms") else None,
        )
        return await self._submit(model, parsed, kind, context, request_id, place)

    async def _images(
        self, request: pb.GenerateRequest, model: NamedModel, context: grpc.aio.ServicerContext
    ) -> dict[str, Any]:
        """The images of a prompt, as its further fields."""
        asked: dict[str, Any] = {}
        if request.HasField("mm_processor_kwargs_json"):
            asked = conversions.to_processing(request.mm_processor_kwargs_json)
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
        tokenizer = model.llm.tokenizer

        def tokenize() -> pb.TokenizeResponse:
            return pb.TokenizeResponse(token_ids=tokenizer.encode(request.text, special))

        answer: pb.TokenizeResponse = await self._text_work.run(
            client_of(context), request.ByteSize(), tokenize
        )
        return answer

    @reported
    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        self._admission.stream(context)
        model = await named_model(request.model, self._models, context)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        check_ids("token_ids", len(request.token_ids), model)
        check_vocabulary("token_ids", request.token_ids, model)
        tokenizer = model.llm.tokenizer

        def detokenize() -> pb.DetokenizeResponse:
            return pb.DetokenizeResponse(text=tokenizer.decode_unlocked(list(request.token_ids), skip))

        answer: pb.DetokenizeResponse = await self._text_work.run(
            client_of(context), request.ByteSize(), detokenize
        )
        return answer

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
            request.operation, request.arguments_json or "{}", remote=True, rollout=self._shared.rollout_api
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


def _method(request: Prompted, stream: str) -> str:
    """The RPC's name: Chat and Generate share a handler."""
    return ("Chat" if isinstance(request, pb.ChatRequest) else "Generate") + stream


def _prompt_of(request: pb.GenerateRequest, model: NamedModel) -> str | list[int]:
    if (kind := request.WhichOneof("prompt")) is None:
        raise InvalidArgument("prompt", None, "must not be empty")
    if kind == "text":
        return str(request.text)
    check_ids("prompt_token_ids", len(request.token_ids.ids), model)
    return list(request.token_ids.ids)


def _with_images(request: pb.GenerateRequest, model: NamedModel, images: dict[str, Any]) -> dict[str, Any]:
    prompt = _prompt_of(request, model)
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, **images}


def _conversation_of(request: pb.ChatRequest) -> Conversation:
    return conversions.to_messages(request.messages), conversions.to_options(request.options)
