"""LLM's embeddings and scores."""

from __future__ import annotations

from collections.abc import Sequence

from jengine.api.embeddings import EmbeddingRequestOutput, ScoringRequestOutput
from jengine.api.llm_requests import LLMRequests
from jengine.api.loras import LoraRequests
from jengine.api.prompts import Prompt, listed
from jengine.api.scoring import scoring_of
from jengine.api.shared_engine import SharedEngine
from jengine.core.lora import LoRARequest
from jengine.core.pooling import Pooling, require_embedder
from jengine.core.service_level import levels
from jengine.text.tokenizer import Tokenizer
from jengine.vllm.translate import accepts


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
