"""Requests that are being answered, and their outputs as they grow. What LLM and AsyncLLM have in common."""

from __future__ import annotations

import time
from collections.abc import Iterable

from jengine.engine import PromptScores, TokenUpdate
from jengine.request import Request, RequestOutput
from jengine.text.completion import CompletionBuilder
from jengine.text.tokenizer import Tokenizer


class LiveOutputs:
    """Tokens go in, outputs grow. Knows no engine: what ends a request there is for the caller to pass on.

    Attributes:
        stopped: (request id, stop string) of requests that their text has ended and the engine does not know of yet; the
            caller takes them out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._live: dict[str, tuple[RequestOutput, CompletionBuilder]] = {}
        self.stopped: list[tuple[str, str]] = []

    def open(self, request: Request) -> RequestOutput:
        """The output of a new request: the one that grows."""
        builder = CompletionBuilder(self._tokenizer, request.params)
        output = RequestOutput(
            request_id=request.request_id, prompt=request.prompt, prompt_token_ids=request.prompt_token_ids, outputs=[builder.output]
        )
        output.metrics.arrival = request.arrival
        self._live[request.request_id] = output, builder
        return output

    def take(self, updates: Iterable[TokenUpdate | PromptScores]) -> list[RequestOutput]:
        """The outputs that these tokens have made grow. Tokens of requests that have ended are dropped."""
        grown = []
        for update in updates:
            if update.request_id not in self._live:
                continue
            if isinstance(update, PromptScores):
                self._score(update)
            else:
                grown.append(self._grow(update))
        return grown

    def abort(self, request_id: str, why: str | None = None) -> RequestOutput | None:
        """End a request's output early, with `why` as its stop_reason; None where it has ended already."""
        if request_id not in self._live:
            return None
        output, builder = self._live.pop(request_id)
        builder.finish("abort", why)
        return _ended(output)

    def _score(self, update: PromptScores) -> None:
        output, builder = self._live[update.request_id]
        if output.prompt_logprobs is None:
            output.prompt_logprobs = [None]
        if update.position == len(output.prompt_logprobs):  # a preempted prompt is scored again
            entries = zip(update.tokens, update.logprobs, strict=True)
            output.prompt_logprobs += [builder.describe(token, *logprobs) for token, logprobs in entries]

    def _grow(self, update: TokenUpdate) -> RequestOutput:
        output, builder = self._live[update.request_id]
        if output.metrics.first_token is None:
            output.metrics.first_token = time.monotonic()
        output.metrics.preemptions = update.preemptions
        if update.logprobs is not None:
            builder.push_logprobs(update.token, *update.logprobs)
        reason, stop_reason = update.finish_reason, update.stop_reason
        matched = builder.push(update.token, ends=reason == "stop")
        if matched is not None:
            if reason is None:
                self.stopped.append((update.request_id, matched))
            reason, stop_reason = "stop", matched
        if reason is not None:
            builder.finish(reason, stop_reason)
            del self._live[update.request_id]
            _ended(output)
        return output


def _ended(output: RequestOutput) -> RequestOutput:
    output.finished, output.metrics.finished = True, time.monotonic()
    return output
