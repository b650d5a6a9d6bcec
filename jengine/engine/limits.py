"""Limits of an engine as plain data, so that impossible requests are rejected before they are queued."""

from __future__ import annotations

from dataclasses import dataclass

from jengine.base.display import counted
from jengine.base.errors import InvalidArgument
from jengine.core.images import PromptImages
from jengine.core.lora import LoraLimits
from jengine.core.pooling import Embedder, Reranker, require_embedder
from jengine.core.request import Request
from jengine.core.scheduling_options import STRATEGIES, StrategyName
from jengine.scheduling.requests.sequence_limits import SequenceLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine accepts: plain data, by which requests are checked in other threads and processes.

    Attributes:
        sequence: the limits of one sequence.
        max_num_seqs: sequences running at once.
        strategies: the strategies that set_strategy accepts.
        eos_token_ids: tokens that end a sequence, unless its request sets ignore_eos.
        embedder: how the model embeds; None if the engine has no programs for embeddings.
        reranker: how the model scores pairs of texts; None if its folder does not say.
        lora: limits of adapters; None if the engine has no programs for them.
        image_rows: embeddings that a prompt may have, of images or given; 0: none.
        embedding_size: numbers of each that a prompt gives; 0: it may give none.
    """

    sequence: SequenceLimits
    max_num_seqs: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    strategies: tuple[StrategyName, ...] = STRATEGIES
    embedder: Embedder | None = None
    reranker: Reranker | None = None
    lora: LoraLimits | None = None
    image_rows: int = 0
    embedding_size: int = 0

    def require_lora(self, field: str, value: object) -> LoraLimits:
        """The limits of adapters. Raises InvalidArgument if the engine has no programs for them."""
        if self.lora is None:
            raise InvalidArgument(field, value, "needs an engine with enable_lora=True")
        return self.lora

    def check_strategy(self, strategy: str) -> StrategyName:
        """Checks that a strategy can be used, and returns it.

        Raises:
            InvalidArgument: unknown strategy, or one that does not work with the engine's batching or with
                batch_invariant.
        """
        for known in self.strategies:
            if strategy == known:
                return known
        why = (
            ""
            if strategy not in STRATEGIES
            else "; the others need batching='continuous' and batch_invariant=False"
        )
        raise InvalidArgument("strategy", strategy, f"must be one of {', '.join(self.strategies)}{why}")

    def _check_images(self, request: Request, images: PromptImages) -> None:
        field, shown, size = "image", counted(len(images.parts), "part"), self.embedding_size
        if images.embeddings:
            field, shown = "prompt_embeds", counted(images.rows, "embedding")
            if not size:
                raise InvalidArgument(field, shown, "needs an engine with enable_prompt_embeds=True")
            for part in images.parts:
                if (width := part.pixels.shape[1]) != size:
                    limit = f"must have shape [tokens, {size}]: {size} is the model's hidden size"
                    raise InvalidArgument(field, f"[{len(part.pixels)}, {width}]", limit)
            if request.params.prompt_logprobs is not None or request.params.repetition_penalty != 1.0:
                limit = "no prompt_logprobs and no repetition_penalty: embeddings have no token ids"
                raise InvalidArgument(field, shown, limit)
        elif not self.image_rows or size:
            raise InvalidArgument(field, shown, "this model, or this engine, reads no images")
        if request.pooling is not None:
            raise InvalidArgument(field, shown, "not in a request for an embedding")
        if images.rows > self.image_rows:
            limit = f"{images.rows} embeddings; at most image_pool_rows = {self.image_rows}"
            raise InvalidArgument(field, shown, limit)

    def validate(self, request: Request) -> None:
        """Checks one of a prompt's requests, as a representative of all of them.

        Raises:
            InvalidArgument: token ids are outside the vocabulary, the model cannot give the embedding, or
                SequenceLimits.validate rejects the request.
        """
        if request.lora_name is not None:
            self.require_lora("lora_request", request.lora_name)
        if request.images is not None:
            self._check_images(request, request.images)
        if request.pooling is not None:
            require_embedder(self.embedder).validate(request.pooling, len(request.prompt_token_ids))
        elif self.embedder is not None and not self.embedder.generates:
            limit = (
                "nothing can be generated: this checkpoint has no output head (lm_head.weight); the model can"
                " only embed"
            )
            raise InvalidArgument("max_tokens", request.params.max_tokens, limit)
        if request.beams is not None and request.beams.beam_width > self.max_num_seqs:
            raise InvalidArgument(
                "beam_width",
                request.beams.beam_width,
                f"at most max_num_seqs = {self.max_num_seqs}: beams run in parallel",
            )
        self.sequence.validate(request, self.eos_token_ids)  # first, since it bounds the number of ids
        vocab = self.vocab_size
        limit = f"ids must be in [0, {vocab})"
        ids = request.prompt_token_ids
        if set(map(type, ids)) != {int}:  # a Python loop would take ten times as long
            raise InvalidArgument("prompt_token_ids", ids, "ids must be whole numbers")
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise InvalidArgument("prompt_token_ids", next(t for t in ids if not 0 <= t < vocab), limit)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if (token := max(getattr(request.params, name) or (0,))) >= vocab:
                raise InvalidArgument(name, token, limit)
