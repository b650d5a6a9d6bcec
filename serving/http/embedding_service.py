"""/v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
from openai.types import CompletionUsage, CreateEmbeddingResponse
from openai.types import Embedding as OpenAIEmbedding

from jengine import AsyncLLM, RequestOutput, SamplingParams
from jengine.serving.answers import Answer
from jengine.serving.errors import Refusal
from jengine.serving.http import replies
from jengine.serving.http.bodies import EMBEDDING, Body
from jengine.serving.http.calls import HttpCall, id_headers
from jengine.serving.http.completion_service import Prompt, listed
from jengine.serving.http.service import CreateService, level_of
from jengine.serving.service import ParsedRequest

PATH = "/v1/embeddings"
STATUS = {"timeout": grpc.StatusCode.DEADLINE_EXCEEDED, "shutdown": grpc.StatusCode.UNAVAILABLE}  # keyed by the reason for an abort


class Embedding(OpenAIEmbedding):
    """An embedding as numbers, or as text in base64 of little-endian float32."""

    embedding: list[float] | str  # type: ignore[assignment]


class Embeddings(CreateEmbeddingResponse):
    data: list[Embedding]  # type: ignore[assignment]
    usage: CompletionUsage  # type: ignore[assignment]


class EmbeddingService(CreateService):
    """Embeds texts and tokens."""

    async def _create(self, call: HttpCall, given: dict[str, Any], size: int, request_id: str) -> None:
        with ExitStack() as stack:
            tracked = [stack.enter_context(self._tracker.track(f"POST {PATH}", request_id, call))]
            self._admission.stream(call)
            body = self._read(EMBEDDING, given, call)
            call.names = dict.fromkeys(("prompt", "prompt_token_ids"), "input")
            llm, prompts = self._models.llm, listed("input", body.get("input"))
            for prompt in prompts:
                if isinstance(prompt, list):
                    self._check_ids("input", len(prompt))
            for index in range(1, len(prompts)):
                tracked.append(stack.enter_context(self._tracker.track(f"POST {PATH}", f"{request_id}-{index}", call)))
            self._admission.check(len(prompts), "input")
            for one in tracked:
                one.place = stack.enter_context(self._admission.place(1, call))
            answers = []
            for prompt, one in zip(prompts, tracked, strict=True):
                handle = await self._submit(llm, _parsed(llm, body, prompt, size), "final", call, one.request_id)
                answers.append(stack.enter_context(Answer(handle, one, None)))
            reply = self._reply([await answer.next() for answer in answers], body.get("encoding_format") == "base64")
        await call.answer(200, reply.encode(), id_headers(request_id))

    def _reply(self, outputs: list[RequestOutput], as_text: bool) -> str:
        data = [Embedding(embedding=_numbers(output, as_text), index=i, object="embedding") for i, output in enumerate(outputs)]
        usage = replies.usage_sum([replies.usage(output, 0) for output in outputs])
        return replies.text_of(Embeddings(data=data, model=self._models.info.name, object="list", usage=usage))


def _parsed(llm: AsyncLLM, body: Body, prompt: Prompt, size: int) -> ParsedRequest:
    special = body.get("add_special_tokens", True)
    read: Callable[[], Prompt] = partial(llm.tokenizer.encode, prompt, False) if isinstance(prompt, str) and not special else lambda: prompt
    return ParsedRequest(
        params=SamplingParams(),
        prompt=read,
        bytes=size,
        **level_of(body),
        embedding={name: body.get(name) for name in ("pooling", "normalize", "dimensions")},
    )


def _numbers(output: RequestOutput, as_text: bool) -> list[float] | str:
    """The numbers of a finished request.

    Raises:
        Refusal: the request was aborted.
    """
    if output.embedding is None:
        reason = str(output.outputs[0].stop_reason)
        raise Refusal(STATUS.get(reason, grpc.StatusCode.INTERNAL), f"the request ended without its embedding: {reason}", cause="abort")
    return base64.b64encode(output.embedding.astype("<f4").tobytes()).decode() if as_text else output.embedding.tolist()
