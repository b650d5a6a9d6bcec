"""AsyncLLM's embeddings."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from jengine.api.backend import Backend
from jengine.api.embeddings import EmbeddingRequestOutput
from jengine.api.loras import AsyncLoras
from jengine.api.prompts import PreparedPrompt, Prompt, is_slow, make_requests
from jengine.api.request_handle import RequestHandle
from jengine.core.lora import LoRARequest
from jengine.core.pooling import Pooling, require_embedder
from jengine.text.stop_strings import StopAutomaton
from jengine.text.tokenizer import Tokenizer


class AsyncEmbeddings(ABC):
    """The part of AsyncLLM that embeds. Requests are handled as in `generate`, and end with a vector."""

    backend: Backend
    loras: AsyncLoras
    tokenizer: Tokenizer
    _ids: itertools.count[int]

    @abstractmethod
    def submit(
        self,
        prompt: Any,
        /,
        *,
        request_id: Any,
        priority: int,
        client: str,
        timeout: Any,
        output_kind: Any,
        lora_request: Any,
    ) -> RequestHandle:
        """See AsyncLLM."""

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
        timeout: float | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> EmbeddingRequestOutput:
        """Embed one prompt. Cancelling this aborts the request.

        Args:
            pooling, normalize, dimensions: as for LLM.embed.
            request_id, priority, client, lora_request: as for `generate`.
            timeout: seconds, after which the request is aborted.

        Raises:
            InvalidArgument: it can never be answered, or the engine has no `embeddings`. Nothing has been
                queued.
            JengineError: the request was aborted.
            EngineDead: the engine has failed, or was closed.
        """
        await self.loras.require(lora_request)
        prepare = partial(
            self.prepare_embedding, prompt, pooling=pooling, normalize=normalize, dimensions=dimensions
        )
        prepared = await asyncio.to_thread(prepare) if is_slow(prompt) else prepare()
        handle = self.submit(
            prepared,
            request_id=request_id,
            priority=priority,
            client=client,
            timeout=timeout,
            output_kind="final",
            lora_request=lora_request,
        )
        async with handle:
            return EmbeddingRequestOutput.of(await anext(handle))

    def prepare_embedding(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> PreparedPrompt:
        """Like `prepare`, for an embedding; see `embed`. The embedding is in the last output of the handle
        returned by `submit`.

        Raises:
            InvalidArgument: it can never be answered, or the engine has no `embeddings`.
        """
        params = require_embedder(self.backend.limits.embedder).params(pooling, normalize, dimensions)
        request_id, length = f"request-{next(self._ids)}", self.backend.limits.sequence.max_model_len
        requests = make_requests(
            self.tokenizer, prompt, None, request_id, max_model_len=length, pooling=params
        )
        self.backend.limits.validate(requests[0])
        return PreparedPrompt(requests, StopAutomaton(()))
