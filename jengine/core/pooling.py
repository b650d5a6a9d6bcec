"""Embeddings and scores: parameters, capabilities of models, and sums of final hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from jengine.base.errors import InvalidArgument, PromptTooLong
from jengine.base.options import check_options, whole

if TYPE_CHECKING:
    import numpy as np

Pooling = Literal["last", "mean"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the final hidden states of a prompt's tokens become one vector.

    Args:
        pooling: last takes the last token's hidden state; mean averages over all tokens. With mean, a request
            computes its whole prompt and does not use the prefix cache.
        normalize: scale the vector to length 1, after it was shortened to `dimensions`.
        dimensions: keep only the first numbers of the vector, for models that were trained for this
            (Matryoshka); None keeps all.
        truncate_dim: as `dimensions`, but shortens the normalized vector; a setting in models' files.
        prompt: put before every text, but not before token ids; a setting in models' files.

    Raises:
        InvalidArgument: naming the field, the value and the limit.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: Annotated[int | None, whole(1)] = None
    truncate_dim: Annotated[int | None, whole(1)] = None
    prompt: str = ""

    @property
    def needs_all(self) -> bool:
        """Whether the hidden states of all tokens are needed, so that none may come from the prefix cache."""
        return self.pooling == "mean"

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """How a model embeds. Plain data that can be sent to other threads and processes.

    Attributes:
        size: numbers in an embedding.
        pooling, normalize: defaults for requests that do not set them.
        max_tokens: the longest prompt that the model was made for; None: as many tokens as a sequence may
            have.
        prompt: see PoolingParams.
        truncate_dim: numbers that are kept if a request does not say; None: all.
        similarity: how scores compare two vectors.
        generates: whether the model can also generate. Some checkpoints have no output head.
    """

    size: int
    pooling: Pooling = "last"
    normalize: bool = True
    max_tokens: int | None = None
    prompt: str = ""
    truncate_dim: int | None = None
    similarity: Similarity = "cosine"
    generates: bool = True

    def params(
        self, pooling: Pooling | None, normalize: bool | None, dimensions: int | None
    ) -> PoolingParams:
        """The parameters of a request; None uses the model's settings.

        Raises:
            InvalidArgument: as in PoolingParams.
        """
        return PoolingParams(
            pooling=self.pooling if pooling is None else pooling,
            normalize=self.normalize if normalize is None else normalize,
            dimensions=dimensions,
            truncate_dim=self.truncate_dim if dimensions is None else None,
            prompt=self.prompt,
        )

    def validate(self, params: PoolingParams, tokens: int) -> None:
        """Checks the limits of the model.

        Args:
            tokens: number of prompt tokens.

        Raises:
            InvalidArgument: there are more dimensions than in an embedding, or more tokens than the model
                supports.
        """
        if params.dimensions is not None and params.dimensions > self.size:
            raise InvalidArgument(
                "dimensions",
                params.dimensions,
                f"must be at most {self.size}, the size of this model's embeddings",
            )
        if self.max_tokens is not None and tokens > self.max_tokens:
            limit = (
                f"{tokens} tokens; at most {self.max_tokens}, the model's max_seq_length or model_max_length"
            )
            raise PromptTooLong("prompt_token_ids", f"{tokens} tokens", limit, tokens, self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranker:
    """A language model that judges a document by its next token: the score compares the probabilities of two
    tokens.

    Attributes:
        true_token_id, false_token_id: ids of the two tokens, such as "yes" and "no".
        instruction: the one in the model's files; None: the chat template's.
        add_generation_prompt: option for the chat template.
        probability: whether a score is the probability of the true token against the false one, or the
            logarithm of their odds.
        max_tokens: see Embedder.
        processed_logprobs: whether the engine's log probabilities are those of the distribution that tokens
            are drawn from.
    """

    true_token_id: int
    false_token_id: int
    instruction: str | None = None
    add_generation_prompt: bool = False
    probability: bool = True
    max_tokens: int | None = None
    processed_logprobs: bool = False


def require_embedder(embedder: Embedder | None) -> Embedder:
    """Returns the embedder.

    Raises:
        InvalidArgument: the engine has no programs for embeddings.
    """
    if embedder is None:
        limit = (
            "must be True when the engine starts (--embeddings), for it to embed; only models with"
            " sentence-transformers' files embed by default"
        )
        raise InvalidArgument("embeddings", False, limit)
    return embedder


class PooledStates:
    """The sum of consecutive tokens' hidden states, added step by step."""

    def __init__(self) -> None:
        self._sum: np.ndarray | None = None  # float64 [hidden_size]
        self._start = self._end = 0  # positions of its tokens

    def add(self, start: int, end: int, states: np.ndarray) -> None:
        """Adds the sum over the tokens at [start, end), float32 [hidden_size].

        Starts again if the tokens do not follow the previous ones, since a preempted prompt is computed
        again.
        """
        if self._sum is None or start != self._end:
            self._sum, self._start = states.astype("float64"), start
        else:
            self._sum += states
        self._end = end

    def vector(self, params: PoolingParams) -> np.ndarray:
        """The mean, shortened and normalized: float32 [dimensions or truncate_dim]."""
        assert self._sum is not None, "a prompt ended without hidden states"
        mean: np.ndarray = (self._sum / (self._end - self._start))[: params.dimensions]
        if params.normalize:
            mean /= max(float(mean @ mean) ** 0.5, 1e-12)
        return mean[: params.truncate_dim].astype("float32")
