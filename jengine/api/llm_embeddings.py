"""LLM's embeddings and scores."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jengine.api.embeddings import EmbeddingRequestOutput, ScoringRequestOutput, similarity
from jengine.api.prompts import Prompt, listed
from jengine.api.reranking import judgement, judging_prompts, paired
from jengine.api.shared_engine import SharedEngine
from jengine.base.errors import InvalidArgument
from jengine.core.pooling import Pooling, PoolingParams, require_embedder
from jengine.core.request import Request, RequestOutput, SamplingParams
from jengine.core.service_level import ServiceLevel, levels
from jengine.text.tokenizer import Tokenizer
from jengine.vllm.translate import accepts

if TYPE_CHECKING:
    from jengine.engine.start import Started


class Embeddings(ABC):
    """The part of LLM that embeds and scores. Its requests share batches and cache with those that
    generate.
    """

    model: str
    started: Started
    tokenizer: Tokenizer
    _shared: SharedEngine

    @abstractmethod
    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """See LLM."""

    @abstractmethod
    def _requests(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        level: ServiceLevel | None = None,
        *,
        pooling: PoolingParams | None = None,
    ) -> list[Request]:
        """Creates and validates a prompt's requests."""

    @abstractmethod
    def _wait_for(self, work: list[list[Request]], desc: str, show: bool) -> list[RequestOutput]:
        """Returns the outputs of prompts' requests when all have ended."""

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
    ) -> list[EmbeddingRequestOutput]:
        """Embeds every prompt: one vector each, in `outputs.embedding`. Results are in the order of the
        prompts.

        Args:
            prompts, priority, client: as for `generate`. Prompts are embedded as they are; add instructions
                yourself.
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
        work = [
            self._requests(prompt, None, level, pooling=params)
            for prompt, level in zip(each, each_level, strict=True)
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
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of a query and a document, in `outputs.score`.

        An embedding model gives the cosine similarity, in [-1, 1]. A reranker gives the probability that the
        document fits, in [0, 1].

        Args:
            queries, documents: one query for all documents, or one query for each document.
            instruction: for rerankers; None uses the one in the model's files.

        Raises:
            InvalidArgument: a text that can never be scored, or a model that cannot score. Nothing has been
                run.
            EngineDead: as `generate`.
        """
        pairs, reranker = paired(queries, documents), self.started.reranker
        if reranker is not None:
            prompts, params = zip(
                *judging_prompts(
                    pairs, reranker, self.tokenizer, instruction, self._shared.limits.sequence.max_model_len
                ),
                strict=True,
            )
            outputs = self.generate(prompts, params, use_tqdm=use_tqdm)
            return [judgement(true, false) for true, false in itertools.batched(outputs, 2)]
        if self._shared.limits.embedder is None:
            limit = (
                "scores need an embedding model, see the option embeddings, or a reranker whose modules.json"
                " has a LogitScore"
            )
            raise InvalidArgument("model", self.model, limit)
        if instruction is not None:
            raise InvalidArgument(
                "instruction", instruction, "is for rerankers; add it to the queries of an embedding model"
            )
        texts = [*dict.fromkeys(text for pair in pairs for text in pair)]
        vectors = dict(zip(texts, self.embed(texts, use_tqdm=use_tqdm), strict=True))
        return [similarity(vectors[query], vectors[document]) for query, document in pairs]
