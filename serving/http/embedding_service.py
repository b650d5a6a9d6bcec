"""/v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from openai.types import CompletionUsage, CreateEmbeddingResponse, Embedding
from pydantic import Field

from jengine import AsyncLLM, RequestOutput, SamplingParams
from jengine.serving.http import parts, replies
from jengine.serving.http.bodies import EMBEDDING, Body
from jengine.serving.http.calls import HttpCall, id_headers
from jengine.serving.http.completion_service import Prompt, listed
from jengine.serving.http.parts import Parts, array, long_array, with_members
from jengine.serving.http.service import HttpService, level_of
from jengine.serving.requests.service import ParsedRequest, check_ids


class Embeddings(CreateEmbeddingResponse):
    """Each embedding in `data` is a list of numbers, or text in base64 of little-endian float32."""

    data: list[Embedding] = Field(default_factory=list)  # added as parts
    usage: CompletionUsage  # type: ignore[assignment]


class EmbeddingService(HttpService):
    """Embeds texts and tokens."""

    PATH = "/v1/embeddings"

    async def _create(self, call: HttpCall, given: dict[str, Any], size: int, request_id: str) -> None:
        with self._tracker.track(f"POST {self.PATH}", request_id, call) as first:
            self._admission.stream(call)
            body, model = await self._read(EMBEDDING, given, call, first)
            call.names = {"prompt": "input"}
            llm, prompts = model.llm, listed("input", body.get("input"))
            for prompt in prompts:
                if isinstance(prompt, list):
                    check_ids("input", len(prompt), model)
            parsed = [partial(_parsed, llm, body, prompt, size) for prompt in prompts]
            outputs = await self._outputs(call, model, first, parsed, "input")
            reply = await self._reply(model.name, outputs, body.get("encoding_format") == "base64")
        await call.answer(200, reply, id_headers(first.request_id))

    async def _reply(self, model: str, outputs: list[RequestOutput], as_text: bool) -> Parts:
        data, portioned = [], self._shared.portions.answer()
        for index, output in enumerate(outputs):
            numbers = _numbers(output)
            if as_text:
                values = parts.encoded(base64.b64encode(numbers.tobytes()).decode())
            else:
                values = await long_array(portioned, numbers, convert=lambda part: np.asarray(part).tolist())
            data.append(
                with_members(parts.encoded({"object": "embedding", "index": index}), {"embedding": values})
            )
        usage = replies.usage_sum([replies.usage(output, 0) for output in outputs])
        head = Embeddings(model=model, object="list", usage=usage)
        return with_members(parts.of(head), {"data": array(data)})


async def _parsed(llm: AsyncLLM, body: Body, prompt: Prompt, size: int) -> ParsedRequest:
    special = body.get("add_special_tokens", True)
    read: Callable[[], Prompt] = lambda: prompt  # noqa: E731
    if isinstance(prompt, str) and not special:
        embedder = llm.backend.limits.embedder
        read = partial(llm.tokenizer.encode, ("" if embedder is None else embedder.prompt) + prompt, False)
    return ParsedRequest(
        params=SamplingParams(),
        prompt=read,
        bytes=size,
        **level_of(body),
        embedding={name: body.get(name) for name in ("pooling", "normalize", "dimensions")},
    )


def _numbers(output: RequestOutput) -> Any:
    """The numbers of a finished request, little-endian float32."""
    assert output.embedding is not None
    return output.embedding.astype("<f4")
