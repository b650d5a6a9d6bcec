"""Methods of LLM and AsyncLLM for embeddings and scores."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jengine.api.backend import Backend
from jengine.api.embeddings import EmbeddingRequestOutput, ScoringRequestOutput
from jengine.api.llm_requests import LLMRequests
from jengine.api.loras import AsyncLoras, LoraRequests
from jengine.api.prompts import PreparedPrompt, Prompt, is_slow, listed, make_requests
from jengine.api.request_handle import RequestHandle
from jengine.api.scoring import scoring_of
from jengine.core.lora import LoRARequest
from jengine.core.pooling import Pooling, require_embedder
from jengine.core.service_level import levels
from jengine.text.stop_strings import StopAutomaton
from jengine.text.tokenizer import Tokenizer
from jengine.vllm.translate import accepts

if TYPE_CHECKING:  # an AsyncLLM over a remote engine needs no jax
    from jengine.api.shared_engine import SharedEngine


class LLMEmbeddings(LLMRequests):
    """The part of LLM that embeds and scores. Its requests share batches and cache with those that
    generate.
    """

    tokenizer: Tokenizer
    _shared: SharedEngine

    @accepts
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        client: str | list[str] | tuple[str, ...] = "",
        lora_request: LoraRequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds every prompt: one vector each, in `outputs.embedding`. Results are in the order of the
        prompts.

        Args:
            prompts, priority, client, lora_request: as for `generate`. Prompts are embedded as they are; add
                instructions yourself.
            pooling, normalize, dimensions: see PoolingParams. None uses the settings in the model's
                sentence-transformers files, or else the last token, normalized, with all dimensions.

        Raises:
            InvalidArgument: a prompt or parameter that can never be answered, or an engine without
                `embeddings`. Nothing has been run.
            EngineDead: as `generate`.
        """
        params = require_embedder(self._shared.limits.embedder).params(pooling, normalize, dimensions)
        each = listed(prompts)
        each_level = levels(len(each), {"priority": priority, "client": client})
        names = self.loras.names(lora_request, len(each))
        work = [
            self._requests(prompt, None, level, pooling=params, lora_name=name)
            for prompt, level, name in zip(each, each_level, names, strict=True)
        ]
        return [EmbeddingRequestOutput.of(output) for output in self._wait_for(work, "embedding", use_tqdm)]

    @accepts
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of a query and a document, in `outputs.score`.

        An embedding model gives the cosine similarity, in [-1, 1]. A reranker gives the probability that the
        document fits, in [0, 1].

        Args:
            queries, documents: one query for all documents, or one query for each document.
            instruction: for rerankers; None uses the one in the model's files.
            lora_request: the adapter that computes both, as for `generate`.

        Raises:
            InvalidArgument: a text that can never be scored, or a model that cannot score. Nothing has been
                run.
            EngineDead: as `generate`.
        """
        scoring = scoring_of(queries, documents, instruction, self._shared.limits, self.tokenizer)
        pooling = (
            require_embedder(self._shared.limits.embedder).params(None, None, None)
            if scoring.embeds
            else None
        )
        [name] = self.loras.names(lora_request, 1)
        work = [
            self._requests(task.prompt(), task.params, pooling=pooling, lora_name=name)
            for task in scoring.tasks
        ]
        return scoring.results(self._wait_for(work, "scoring", use_tqdm))


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
        """Queues one prompt."""

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
