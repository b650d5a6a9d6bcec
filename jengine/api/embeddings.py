"""What `embed` and `score` return, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jengine.display import counted, table_html
from jengine.errors import JengineError
from jengine.request import RequestOutput

SHOWN = 6  # numbers of an embedding, in a notebook


@dataclass(slots=True, kw_only=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]

    def __repr__(self) -> str:
        return f"EmbeddingOutput({counted(len(self.embedding), 'dimension')})"


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """A prompt that was embedded.

    Attributes:
        num_cached_tokens: of the prompt, taken from the prefix cache.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True

    def _repr_html_(self) -> str:
        first = ", ".join(f"{number:.4f}" for number in self.outputs.embedding[:SHOWN])
        more = ", ..." if len(self.outputs.embedding) > SHOWN else ""
        return table_html([("prompt", _tokens(self)), ("embedding", f"{counted(len(self.outputs.embedding), 'dimension')}: {first}{more}")])

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """
        Raises:
            JengineError: the request was ended before it had its embedding.
        """
        if output.embedding is None:
            ended = output.outputs[0]
            why = "" if ended.stop_reason is None else f": {ended.stop_reason}"
            raise JengineError(f"the request ended without its embedding, with finish_reason {ended.finish_reason!r}{why}")
        return cls(
            request_id=output.request_id,
            outputs=EmbeddingOutput(embedding=output.embedding.tolist()),
            prompt_token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens or 0,
        )


@dataclass(slots=True, kw_only=True)
class ScoringOutput:
    """The score of a document for a query: higher is better."""

    score: float


@dataclass(slots=True, kw_only=True)
class ScoringRequestOutput:
    """A query and a document that were scored.

    Attributes:
        prompt_token_ids: of both; a reranker's prompt.
        num_cached_tokens: of them, taken from the prefix cache.
    """

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True

    def _repr_html_(self) -> str:
        return table_html([("prompt", _tokens(self)), ("score", f"{self.outputs.score:.4f}")])


def _tokens(output: EmbeddingRequestOutput | ScoringRequestOutput) -> str:
    """Of the prompt."""
    return f"{counted(len(output.prompt_token_ids), 'token')}, {output.num_cached_tokens} cached"


def similarity(query: EmbeddingRequestOutput, document: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """The cosine of the angle between two embeddings."""
    a, b = np.array(query.outputs.embedding), np.array(document.outputs.embedding)
    cosine = float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)
    return ScoringRequestOutput(
        request_id=f"{query.request_id}_{document.request_id}",
        outputs=ScoringOutput(score=cosine),
        prompt_token_ids=query.prompt_token_ids + document.prompt_token_ids,
        num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
    )
