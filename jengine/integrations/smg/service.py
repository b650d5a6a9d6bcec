"""vllm.grpc.engine.VllmEngine: the worker service of the gateway smg, tokens in and tokens out.

smg's package smg-grpc-proto has its messages. The gateway renders conversations, tokenizes and detokenizes.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import time
import zipfile
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jengine import InvalidArgument, RequestOutput, SamplingParams, __version__
from jengine.integrations.smg import events, messages
from jengine.serving.calls.errors import Refusal, reported
from jengine.serving.calls.named_model import NamedModel, named_model
from jengine.serving.grpc.conversions import MOST_TOKENS
from jengine.serving.guards.admission import check_admin, client_of, sees_all_clients
from jengine.serving.guards.security import scoped
from jengine.serving.requests.answers import Answer, PatientWriter
from jengine.serving.requests.service import ParsedRequest, Service, Shared, check_ids
from jengine.spi import OutputKind

log = logging.getLogger("jengine.serving")
DESCRIPTOR = pb.DESCRIPTOR.services_by_name["VllmEngine"]
CHUNK = 64 * 1024  # bytes of a tokenizer's archive in a message
EMBEDDING = dict.fromkeys(("pooling", "normalize", "dimensions"))
# files of a model's folder that a gateway may need, beside templates
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json",
    "special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model", "tekken.json",
    "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


class SmgService(Service):
    """The service of the default model."""

    def __init__(self, shared: Shared, health: health.aio.HealthServicer) -> None:
        super().__init__(shared)
        self._health, self._began, self._asked = health, time.monotonic(), 0.0
        self._archive: tuple[Path, bytes] | None = None

    # --- generation -------------------------------------------------------------------------------

    @reported
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        self._asked = time.time()
        with self._tracker.track("smg/Generate", request.request_id, context) as tracked:
            self._admission.stream(context)
            messages.check_fields(request)
            model = await named_model("", self._models, context)
            tracked.uses(model)
            params = self._bounds.params(messages.to_params(request.sampling_params))
            parsed = ParsedRequest(params, partial(_prompt_of, request, model), request.ByteSize())
            kind: OutputKind = "delta" if request.stream else "final"
            with (
                self._admission.place(params.n, context) as tracked.place,
                await self._submit(model, parsed, kind, context, tracked, "asked for") as answer,
            ):
                write = PatientWriter(context, self._config.write_timeout, answer)
                send = self._stream if request.stream else self._whole
                await send(answer, params, write)

    async def _stream(self, answer: Answer, params: SamplingParams, write: PatientWriter) -> None:
        """Each completion's tokens as they come, and its end, with all of its tokens."""
        prompt: pb.InputLogProbs | None = None
        begun, ended, finished = set[int](), set[int](), False
        while not finished:
            output = await answer.next()
            finished = output.finished
            if not begun:
                prompt = await self._prompt_scores(output, params)
            for completion in output.outputs:
                for start in range(0, len(completion.token_ids), MOST_TOKENS):
                    part, first = slice(start, start + MOST_TOKENS), completion.index not in begun
                    begun.add(completion.index)
                    scores = prompt if first else None
                    await write.write(messages.chunk(output, completion, part, params.logprobs, scores))
                if completion.finish_reason is not None and completion.index not in ended:
                    ended.add(completion.index)
                    whole = answer.output.outputs[completion.index]
                    await write.write(pb.GenerateResponse(complete=messages.complete(output, whole)))

    async def _whole(self, answer: Answer, params: SamplingParams, write: PatientWriter) -> None:
        output = await answer.next()
        prompt, portions = await self._prompt_scores(output, params), self._shared.portions
        for completion in output.outputs:
            message = messages.complete(output, completion)
            if completion.logprobs is not None:
                more = completion.logprobs, params.logprobs, portions
                await messages.add_scores(message.output_logprobs, completion.token_ids, *more)
            if prompt is not None:
                message.input_logprobs.CopyFrom(prompt)
            await write.write(pb.GenerateResponse(complete=message))

    async def _prompt_scores(self, output: RequestOutput, params: SamplingParams) -> pb.InputLogProbs | None:
        if output.prompt_logprobs is None:
            return None
        scores, portions = pb.InputLogProbs(), self._shared.portions
        more = output.prompt_logprobs, params.prompt_logprobs, portions
        await messages.add_scores(scores, output.prompt_token_ids, *more)
        return scores

    @reported
    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> pb.EmbedResponse:
        with self._tracker.track("smg/Embed", request.request_id, context) as tracked:
            self._admission.stream(context)
            model = await named_model("", self._models, context)
            tracked.uses(model)
            check_ids("prompt_token_ids", len(request.tokenized.input_ids), model)
            ids, size = list(request.tokenized.input_ids), request.ByteSize()
            parsed = ParsedRequest(SamplingParams(), lambda: ids, size, embedding=EMBEDDING)
            with (
                self._admission.place(1, context) as tracked.place,
                await self._submit(model, parsed, "final", context, tracked) as answer,
            ):
                output = await answer.next()
        assert output.embedding is not None
        return pb.EmbedResponse(
            embedding=output.embedding,
            prompt_tokens=len(output.prompt_token_ids),
            embedding_dim=len(output.embedding),
        )

    @reported
    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        for request_id in request.request_ids:
            for llm in self._models.running():
                await llm.abort(scoped(request_id))
        return pb.AbortResponse()

    # --- what is here -----------------------------------------------------------------------------

    @reported
    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        state = await self._health.Check(HealthCheckRequest(), context)
        ready = state.status == HealthCheckResponse.SERVING
        return pb.HealthCheckResponse(healthy=ready, message="serving" if ready else "not serving")

    @reported
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        info, llm = self._models.info, self._models.llm
        tokenizer, longest = llm.tokenizer, info.limits.sequence.max_model_len
        ids = {
            name: tokenizer.backend.token_to_id(token)
            for name in ("pad", "bos")
            if (token := tokenizer.special_tokens.get(f"{name}_token")) is not None
        }
        folder = "" if tokenizer.folder is None else str(tokenizer.folder)
        return pb.GetModelInfoResponse(
            model_path=folder or info.name,
            tokenizer_path=folder,
            served_model_name=info.name,
            is_generation=True,
            max_context_length=longest,
            max_req_input_len=longest,
            vocab_size=info.limits.vocab_size,
            eos_token_ids=info.limits.eos_token_ids,
            default_sampling_params_json=messages.defaults_of(llm.get_default_sampling_params()),
            **{f"{name}_token_id": token for name, token in ids.items() if token is not None},
        )

    @reported
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        info, llm = self._models.info, self._models.llm
        load = llm.load
        return pb.GetServerInfoResponse(
            active_requests=load.running + load.waiting,
            is_paused=self._config.rollout_api and await llm.is_paused(),  # nothing else pauses it
            last_receive_timestamp=self._asked,
            uptime_seconds=time.monotonic() - self._began,
            server_type="jengine-grpc",
            data_parallel_size=1,
            block_size=info.limits.sequence.page_size,
            model_dtype=info.dtype,
            max_num_seqs=info.limits.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    @reported
    async def GetLoads(
        self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        limit = self._models.info.limits.max_num_seqs
        load = messages.scheduler_load(self._models.llm.load, limit, sees_all_clients())
        now = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, version=__version__, dp_rank_count=1, loads=[load])

    @reported
    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> None:
        folder = self._models.llm.tokenizer.folder
        if folder is None or not folder.is_dir():
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION, "the tokenizer is in a GGUF file, not in a folder"
            )
        if self._archive is None or self._archive[0] != folder:
            self._archive = folder, await asyncio.to_thread(_archive, folder)
        data = self._archive[1]
        name = hashlib.sha256(data).hexdigest()
        for start in range(0, len(data), CHUNK):
            last = start + CHUNK >= len(data)
            part = common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK], sha256=name if last else "")
            await context.write(part)

    @reported
    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        check_admin(context.peer())
        done = await self._models.llm.reset_prefix_cache()
        log.info("%s has reset the prefix cache", client_of(context))
        return common_pb2.FlushCacheResponse(success=done, message="running requests keep their pages")

    @reported
    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        raise Refusal(grpc.StatusCode.UNIMPLEMENTED, "use `jengine profile` with this server's address")

    StopProfile = StartProfile

    # --- page events ------------------------------------------------------------------------------

    @reported
    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        if not sees_all_clients():
            message = "page events have all clients' tokens; this needs an API key with admin=1"
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, message, cause="admin")
        source = self._models.info.page_events
        if source is None:
            raise Refusal(
                grpc.StatusCode.UNIMPLEMENTED, "this server publishes no page events; see kv_events_config"
            )
        await context.send_initial_metadata(())
        number, sample = 0, 0
        silent = not request.load_records_before_first_batch  # until the first batch
        async for batch in events.Relay(source).batches(request.start_sequence_number):
            if batch is None and silent:
                continue
            if batch is not None:
                number, silent = batch[0], False
                message = events.batch_of(*batch)
            else:
                message = common_pb2.KvEventBatch(sequence_number=number, timestamp=time.time(), dp_rank=0)
            sample += 1
            message.load.CopyFrom(self._engine_load(sample))
            message.load.load_only = batch is None
            await context.write(message)

    def _engine_load(self, sample: int) -> common_pb2.EngineLoad:
        load = self._models.llm.load
        used = (load.pages - load.free_pages) / load.pages
        return common_pb2.EngineLoad(
            running_requests=load.running,
            waiting_requests=load.waiting,
            token_usage=used,
            active_token_usage=used,
            max_running_requests=self._models.info.limits.max_num_seqs,
            sample=sample,
        )


def smg_service(shared: Shared, health: health.aio.HealthServicer) -> tuple[ServiceDescriptor, SmgService]:
    """The service, for `build_server`."""
    return DESCRIPTOR, SmgService(shared, health)


def _prompt_of(request: pb.GenerateRequest, model: NamedModel) -> str | list[int]:
    kind = request.WhichOneof("input")
    if kind == "text":
        if request.sampling_params.HasField("truncate_prompt_tokens"):
            ids = model.llm.tokenizer.encode(request.text)
            return messages.truncated(ids, request.sampling_params, model.max_model_len)
        return str(request.text)
    if kind is None:
        raise InvalidArgument("prompt", None, "must be given as tokenized or text")
    ids = request.tokenized.input_ids
    if not request.sampling_params.HasField("truncate_prompt_tokens"):
        check_ids("prompt_token_ids", len(ids), model)
    return messages.truncated(list(ids), request.sampling_params, model.max_model_len)


def _archive(folder: Path) -> bytes:
    """The tokenizer's files as a zip file."""
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    names += sorted(file.name for file in folder.glob("*.jinja"))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.write(folder / name, name)
    return out.getvalue()
