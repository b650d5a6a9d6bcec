"""Outputs of running requests, which grow as tokens arrive. Shared by LLM and AsyncLLM."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jengine.core.request import CompletionOutput, FinishReason, Request, RequestOutput
from jengine.core.updates import BeamsFound, Ended, Pooled, PromptScores, TokenUpdate, Update
from jengine.text.completion import CompletionBuilder, PromptLogprobs, StopAutomaton, beam_output
from jengine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Answer:
    """A prompt's output, and the builders that extend it, by the ids of the prompt's requests."""

    output: RequestOutput
    builders: dict[str, CompletionBuilder]
    preemptions: dict[str, int]


class LiveOutputs:
    """Growing outputs: one for each prompt, with a completion for each of its requests. The text of an output
    that has not ended may wait for `settle`.

    Independent of the engine. The caller must end requests in the engine that end here.

    Args:
        lazy: describe log probabilities of prompts when they are read, with PromptLogprobs.

    Attributes:
        ended: requests that were aborted or ended by their text, and that the engine still runs. The caller
            removes them.
    """

    def __init__(self, tokenizer: Tokenizer, *, lazy: bool = False) -> None:
        self._tokenizer, self._lazy = tokenizer, lazy
        # keyed by each of a prompt's requests, until all of them have ended
        self._live: dict[str, _Answer] = {}
        self.ended: list[Ended] = []

    def open(self, requests: list[Request], stops: StopAutomaton | None = None) -> RequestOutput:
        """Creates the growing output of a prompt's requests. Its id is that of the first request.

        stops: stop strings of their parameters; None compiles them.
        """
        first = requests[0]
        stops = stops or StopAutomaton.of(tuple(first.params.stop))
        builders = {
            request.request_id: CompletionBuilder(self._tokenizer, request, stops) for request in requests
        }
        output = RequestOutput(
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=[builder.output for builder in builders.values()],
        )
        if first.params.prompt_logprobs is not None and len(first.prompt_token_ids) == 1:
            output.prompt_logprobs = [None]  # the first token has none, and there is no other
        output.metrics.arrival = first.arrival
        self._live |= dict.fromkeys(builders, _Answer(output, builders, dict.fromkeys(builders, 0)))
        return output

    def take(self, updates: Iterable[Update]) -> list[RequestOutput]:
        """The outputs that these updates extended or ended, once each. Ended requests are skipped."""
        grown: dict[int, RequestOutput] = {}
        for update in updates:
            answer = self._live.get(update.request_id)
            if answer is None:
                continue
            builder = answer.builders[update.request_id]
            if builder.output.finish_reason is not None:
                continue
            if isinstance(update, TokenUpdate):
                self._grow(answer, builder, update)
            elif isinstance(update, PromptScores):
                self._score(answer, update)
                continue
            elif isinstance(update, Ended):
                self._finish(answer, builder, update.reason, update.stop_reason)
            elif isinstance(update, BeamsFound):
                self._note(answer, update)
                self._show_beams(answer, update)
            elif isinstance(update, Pooled):
                answer.output.embedding = np.frombuffer(update.embedding, np.float32)
                self._note(answer, update)
                self._finish(answer, builder, "stop", None)
            grown[id(answer)] = answer.output
        return list(grown.values())

    def settle(self, request_id: str) -> None:
        """Completes the text of this output, unless it has ended. Call this before its text is read."""
        answer = self._live.get(request_id)
        if answer is not None:
            for builder in answer.builders.values():
                builder.settle()

    def abort(self, request_id: str, why: str | None = None) -> RequestOutput | None:
        """Ends this output's unfinished completions with `why` as stop_reason. None: all have ended."""
        answer = self._live.get(request_id)
        if answer is None:
            return None
        for completion_id, builder in answer.builders.items():
            if builder.output.finish_reason is None:
                self.ended.append(Ended(completion_id, "abort", why))
                self._finish(answer, builder, "abort", why)
        return answer.output

    def _show_beams(self, answer: _Answer, update: BeamsFound) -> None:
        """Creates a completion for each beam."""
        builder = answer.builders[update.request_id]
        answer.output.outputs = [
            beam_output(self._tokenizer, builder.request, index, beam, update.version)
            for index, beam in enumerate(update.beams)
        ]
        self._finish(answer, builder, update.beams[0].finish_reason, None)

    def _note(self, answer: _Answer, update: TokenUpdate | Pooled | BeamsFound) -> None:
        """Records times and counts."""
        request_id, output = update.request_id, answer.output
        metrics, builder = output.metrics, answer.builders[request_id]
        if metrics.first_token is None:
            metrics.first_token = time.monotonic()
            metrics.scheduled = update.scheduled or None
            output.num_cached_tokens = update.cached
        elif builder.output is output.outputs[0]:  # the first completion to start
            output.num_cached_tokens = update.cached
        if update.preemptions != (before := answer.preemptions[request_id]):
            metrics.preemptions += update.preemptions - before
            answer.preemptions[request_id] = update.preemptions

    def _grow(self, answer: _Answer, builder: CompletionBuilder, update: TokenUpdate) -> None:
        self._note(answer, update)
        builder.note_version(update.version)
        if update.logprobs is not None:
            builder.push_logprobs(update.token, *update.logprobs)
        reason, stop_reason = update.finish_reason, update.stop_reason
        matched = builder.push(update.token, ends=reason == "stop")
        if matched is not None:
            if reason is None:
                self.ended.append(Ended(update.request_id, "stop", matched))
            reason, stop_reason = "stop", matched
        if reason is not None:
            self._finish(answer, builder, reason, stop_reason)

    def _score(self, answer: _Answer, update: PromptScores) -> None:
        output, builder = answer.output, answer.builders[update.request_id]
        if output.prompt_logprobs is None:
            scores: Any = PromptLogprobs(builder) if self._lazy else [None]
            output.prompt_logprobs = scores
        else:
            scores = output.prompt_logprobs
        # a preempted prompt is scored again, perhaps in other tiles
        new = len(scores) - update.position
        tokens, logprobs = update.tokens[new:], update.logprobs[new:]
        if self._lazy:
            scores.add(tokens, logprobs)
        else:
            entries = zip(tokens, logprobs, strict=True)
            scores += [builder.describe(token, *logprobs) for token, logprobs in entries]

    def _finish(
        self, answer: _Answer, builder: CompletionBuilder, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        builder.finish(reason, stop_reason)
        output = answer.output
        if all(completion.finish_reason is not None for completion in output.outputs):
            output.finished, output.metrics.finished = True, time.monotonic()
            for request_id in answer.builders:
                del self._live[request_id]


def blank_copy(output: RequestOutput) -> RequestOutput:
    """A copy without generated text and tokens, which `catch_up` updates."""
    outputs = [CompletionOutput(index=completion.index) for completion in output.outputs]
    return replace(output, outputs=outputs, metrics=replace(output.metrics))


def catch_up(copy: RequestOutput, output: RequestOutput) -> None:
    """Updates a copy of a growing output, in time proportional to what is new."""
    for mine, completion in zip(copy.outputs, output.outputs, strict=True):
        mine.text = completion.text
        mine.token_ids += completion.token_ids[len(mine.token_ids) :]
        if completion.logprobs is not None:
            mine.logprobs = [] if mine.logprobs is None else mine.logprobs
            mine.logprobs += completion.logprobs[len(mine.logprobs) :]
        mine.weights_versions += completion.weights_versions[len(mine.weights_versions) :]
        mine.cumulative_logprob = completion.cumulative_logprob
        mine.finish_reason, mine.stop_reason = completion.finish_reason, completion.stop_reason
    copy.prompt_logprobs = output.prompt_logprobs
    copy.finished = output.finished
    copy.metrics = replace(output.metrics)
    copy.num_cached_tokens, copy.embedding = output.num_cached_tokens, output.embedding
