"""Maximum sizes of a sequence, checked before a request is queued."""

from __future__ import annotations

from dataclasses import dataclass

from jengine.base.errors import InvalidArgument, PromptTooLong
from jengine.core.request import DEVICE_STOPS, Request
from jengine.table.program_table import most_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLimits:
    """Limits of one sequence.

    Attributes:
        max_model_len: tokens, prompt and output together.
        page_size: tokens in a page.
        pages: pages in the cache, without the null page.
        windows: one for each of the model's cache groups; None: the group keeps all tokens.
        tile_size: tokens of a tile.
        whole: tokens of the most tiles that a step must be able to hold, see ProgramTable.
        recurrent: whether the model has recurrent states.
        prefix: whether the tokens of a prompt see each other (prefix-LM): a step computes all of them.
    """

    max_model_len: int
    page_size: int
    pages: int
    windows: tuple[int | None, ...] = (None,)
    tile_size: int = 1
    whole: int = 0
    recurrent: bool = False
    prefix: bool = False

    def validate(self, request: Request, eos_token_ids: tuple[int, ...]) -> None:
        """Rejects requests that can never be served.

        Raises:
            PromptTooLong: the prompt leaves no room for a token, or no step can compute all of it at once.
            InvalidArgument: the prompt is empty, there are too many stop tokens, the cache is too small for
                this request alone, or its parameters do not work with the model.
        """
        params, prompt = request.params, request.prompt_token_ids
        if not prompt:
            raise InvalidArgument("prompt_token_ids", prompt, "must hold at least 1 token")
        longest, limit = longest_prompt(self.max_model_len, pooled=request.pooling is not None)
        if (tokens := len(prompt)) > longest:
            limit = f"{tokens} tokens; {limit}"
            raise PromptTooLong("prompt_token_ids", prompt, limit, tokens, self.max_model_len)
        if self.prefix and tokens > self.whole:
            limit = f"{tokens} tokens; at most {self.whole}, in one step: see max_num_batched_tokens"
            raise PromptTooLong("prompt_token_ids", prompt, limit, tokens, self.whole)
        if self.prefix and params.prompt_logprobs is not None:
            limit = "must be None: the tokens of this model's prompts see those behind them"
            raise InvalidArgument("prompt_logprobs", params.prompt_logprobs, limit)
        if request.beams is not None and self.recurrent:
            raise InvalidArgument(
                "beam_width",
                request.beams.beam_width,
                "no beam search with a model that has recurrent states",
            )
        if (
            params.min_tokens
            and not params.many_stops
            and (stops := len({*params.stop_token_ids, *eos_token_ids})) > DEVICE_STOPS
        ):
            limit = (
                f"must be 0: the model has {len(eos_token_ids)} end-of-sequence tokens; {stops} with"
                f" stop_token_ids, at most {DEVICE_STOPS}"
            )
            raise InvalidArgument("min_tokens", params.min_tokens, limit)
        max_len = self.max_len(request)
        # The last token is never an input, so its keys and values are not written.
        pages = self._most_pages(request, max_len - 1)
        if pages > self.pages:
            beams = "" if request.beams is None else f", of each of {request.beams.beam_width} beams,"
            limit = (
                f"{len(prompt)} prompt tokens and up to {max_len - len(prompt)} more{beams} need {pages}"
                f" pages of {self.page_size} tokens; the cache has {self.pages}"
            )
            raise InvalidArgument("max_tokens", params.max_tokens, limit)

    def max_len(self, request: Request) -> int:
        """Total tokens, prompt and output, at which the request ends."""
        if request.pooling is not None:
            return len(request.prompt_token_ids) + 1  # the sampled token is discarded
        max_tokens = request.params.max_tokens
        return (
            self.max_model_len
            if max_tokens is None
            else min(len(request.prompt_token_ids) + max_tokens, self.max_model_len)
        )

    @property
    def at_once(self) -> int:
        """Tokens for which a prefill needs room at once."""
        return max(self.tile_size, self.whole)

    def longest_after(self, tokens: int, steps: int) -> int:
        """Length of a sequence of this many tokens after a burst, or at its end if that comes first."""
        return min(tokens + steps - 1, self.max_model_len)

    def _most_pages(self, request: Request, tokens: int) -> int:
        """Maximum pages of a request. Its beams share the prompt's whole pages in groups without a window."""
        pages = self.most_pages(tokens)
        if request.beams is None:
            return pages
        shared = (
            len(request.prompt_token_ids) // self.page_size * sum(window is None for window in self.windows)
        )
        return shared + request.beams.beam_width * (pages - shared)

    def most_pages(self, tokens: int) -> int:
        """Maximum pages that a sequence holds, over all cache groups, until it has this many tokens."""
        return sum(most_pages(tokens, window, self.page_size, self.at_once) for window in self.windows)


def longest_prompt(max_model_len: int, *, pooled: bool) -> tuple[int, str]:
    """Maximum tokens of a prompt, and the limit in words. pooled: whether it is for an embedding."""
    if pooled:
        return max_model_len, f"at most max_model_len = {max_model_len}"
    return (
        max_model_len - 1,
        f"at most max_model_len - 1 = {max_model_len - 1}, to leave room for one generated token",
    )
