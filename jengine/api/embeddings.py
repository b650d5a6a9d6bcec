"""Results of `embed` and `score`, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from jengine.base.display import counted, table_html
from jengine.core.request import RequestOutput

SHOWN = 6  # numbers of an embedding shown in a notebook


@dataclass(slots=True, kw_only=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    def __repr__(self) -> str:
        return f"EmbeddingOutput({counted(len(self.embedding), 'dimension')})"


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """The result for an embedded prompt.

    Attributes:
        num_cached_tokens: number of prompt tokens taken from the prefix cache.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True

    def _repr_html_(self) -> str:
        first = ", ".join(f"{number:.4f}" for number in self.outputs.embedding[:SHOWN])
        more = ", ..." if len(self.outputs.embedding) > SHOWN else ""
        return table_html(
            [
                ("prompt", _tokens(self)),
                ("embedding", f"{counted(len(self.outputs.embedding), 'dimension')}: {first}{more}"),
            ]
        )

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """Converts the output of an embedding request.

        Raises:
            JengineError: the request ended before its embedding was computed.
        """
        output.require_answer("its embedding")
        assert output.embedding is not None
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
    """The result for a query and a document.

    Attributes:
        prompt_token_ids: of both texts; of the prompt, for a reranker.
        num_cached_tokens: number of these tokens taken from the prefix cache.
    """

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True

    def _repr_html_(self) -> str:
        return table_html([("prompt", _tokens(self)), ("score", f"{self.outputs.score:.4f}")])


def _tokens(output: EmbeddingRequestOutput | ScoringRequestOutput) -> str:
    """Shows the tokens of the prompt."""
    return f"{counted(len(output.prompt_token_ids), 'token')}, {output.num_cached_tokens} cached"
