"""Requests that are being answered, and their outputs as they grow. What LLM and AsyncLLM have in common."""

from __future__ import annotations

import time

from jengine.engine import Engine, TokenUpdate
from jengine.request import Request, RequestOutput
from jengine.text.completion import CompletionBuilder
from jengine.text.tokenizer import Tokenizer


class LiveOutputs:
    """An engine seen through text: requests go in, outputs grow."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._live: dict[str, tuple[RequestOutput, CompletionBuilder]] = {}

    def submit(self, request: Request) -> RequestOutput:
        """Queue a request; the output returned is the one that grows.

        Raises:
            InvalidArgument: as Engine.add.
        """
        self._engine.add(request)
        builder = CompletionBuilder(self._tokenizer, request.params)
        output = RequestOutput(
            request_id=request.request_id, prompt=request.prompt, prompt_token_ids=request.prompt_token_ids, outputs=[builder.output]
        )
        output.metrics.arrival = request.arrival
        self._live[request.request_id] = output, builder
        return output

    def advance(self) -> list[RequestOutput]:
        """One step of the engine. Returns the outputs that grew."""
        return [self._grow(update) for update in self._engine.step() if update.sequence.request_id in self._live]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request early; its output says so. None where it has ended already."""
        sequence = self._engine.abort(request_id)
        if sequence is None or request_id not in self._live:
            return None
        output, builder = self._live[request_id]
        builder.finish("abort", None)
        self._end(output, sequence.num_preemptions)
        return output

    def _grow(self, update: TokenUpdate) -> RequestOutput:
        sequence = update.sequence
        output, builder = self._live[sequence.request_id]
        if output.metrics.first_token is None:
            output.metrics.first_token = time.monotonic()
        if sequence.request.params.logprobs is not None:
            builder.push_logprobs(update.token, update.logprob, update.rank, update.top)
        matched = builder.push(update.token, ends=update.finished and sequence.finish_reason == "stop")
        if matched is not None:
            self._engine.finish(sequence, "stop", matched)
        if matched is not None or update.finished:
            assert sequence.finish_reason is not None
            builder.finish(sequence.finish_reason, sequence.stop_reason)
            self._end(output, sequence.num_preemptions)
        return output

    def _end(self, output: RequestOutput, preemptions: int) -> None:
        output.finished = True
        output.metrics.finished, output.metrics.preemptions = time.monotonic(), preemptions
        del self._live[output.request_id]
