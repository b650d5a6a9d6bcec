"""Builds a CompletionOutput from a request's tokens as they arrive: text, stop strings, log probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

from jengine.core.request import CompletionOutput, FinishReason, Logprob, Request
from jengine.core.updates import Beam, TokenLogprobs
from jengine.core.weights import Version
from jengine.text.stop_strings import StopAutomaton, StopStrings
from jengine.text.tokenizer import Tokenizer

MOST_PENDING = 256  # tokens that wait for their text, so that making it never takes long


class CompletionBuilder:
    """Extends a request's `output` token by token, in constant time per token. `stops`: stop strings of its
    params.

    Text is made for many tokens at once, by `settle`, since that takes much less time than token by token.
    Stop strings must be found at once, so requests with them do not wait.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, stops: StopAutomaton) -> None:
        self.request, self.output = request, CompletionOutput(index=request.sample_index)
        self._tokenizer = tokenizer
        self._params = params = request.params
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, after=request.prompt_token_ids
        )
        self._stops = StopStrings(stops)
        self._pending: list[int] = []  # tokens without text yet
        self._most = 1 if params.stop else MOST_PENDING
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0

    def push(self, token: int, *, ends: bool) -> str | None:
        """Adds a token. Returns the stop string that it completes, if any. `ends`: it is a stop token, which
        has no text."""
        self.output.token_ids.append(token)
        if not self._params.detokenize or (ends and not self._params.include_stop_str_in_output):
            return None
        self._pending.append(token)
        return self.settle() if len(self._pending) >= self._most else None

    def settle(self) -> str | None:
        """Adds the text of tokens that wait for it, before the output is read. Returns as `push`."""
        if not self._pending:
            return None
        pending, self._pending = self._pending, []
        return self._emit(self._detokenizer.push(pending))

    def note_version(self, version: Version) -> None:
        """The next tokens were made by weights of this version."""
        versions = self.output.weights_versions
        if not versions or versions[-1][1] != version:
            versions.append((len(self.output.token_ids), version))

    def push_logprobs(self, token: int, logprob: float, rank: int, top: Sequence[tuple[int, float]]) -> None:
        """Appends a token's log probability, and those of the likeliest tokens; see `describe`."""
        assert self.output.logprobs is not None and self.output.cumulative_logprob is not None
        self.output.cumulative_logprob += logprob
        self.output.logprobs.append(self.describe(token, logprob, rank, top))

    def describe(
        self, token: int, logprob: float, rank: int, top: Sequence[tuple[int, float]]
    ) -> dict[int, Logprob]:
        """`top`: the requested number of most likely tokens, best first. The token itself comes first, as in
        vLLM.
        """
        entry = {token: Logprob(logprob, rank, self._text(token))}
        for i, (other, value) in enumerate(top, start=1):
            entry.setdefault(other, Logprob(value, i, self._text(other)))
        return entry

    def _text(self, token: int) -> str | None:
        return self._tokenizer.token_text(token) if self._params.detokenize else None

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Ends the output: emits text held back, unless a stop string ended it. Returns a stop string found
        only now.
        """
        if not (reason == "stop" and isinstance(stop_reason, str)):
            self.settle()
            matched = self._emit(self._detokenizer.flush())
            if matched is None:
                self.output.text += self._stops.flush()
            else:
                reason, stop_reason = "stop", matched
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason

    def _emit(self, delta: str) -> str | None:
        text, matched = self._stops.push(delta, early=len(self.output.token_ids) <= self._params.min_tokens)
        self.output.text += text
        if matched is not None and self._params.include_stop_str_in_output:
            self.output.text += matched
        return matched


class PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """Log probabilities of a prompt's tokens, None for the first. Described when they are read: a prompt may
    have a million.

    Args:
        builder: of the prompt's first completion.
    """

    def __init__(self, builder: CompletionBuilder) -> None:
        self._builder = builder
        self._scores: list[tuple[int, TokenLogprobs] | None] = [None]

    def add(self, tokens: Iterable[int], logprobs: Iterable[TokenLogprobs]) -> None:
        self._scores += zip(tokens, logprobs, strict=True)

    def __len__(self) -> int:
        return len(self._scores)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        if isinstance(index, slice):
            return [self._described(score) for score in self._scores[index]]
        return self._described(self._scores[index])

    def _described(self, score: tuple[int, TokenLogprobs] | None) -> dict[int, Logprob] | None:
        return None if score is None else self._builder.describe(score[0], *score[1])


def beam_output(
    tokenizer: Tokenizer, request: Request, index: int, beam: Beam, version: Version
) -> CompletionOutput:
    """Converts a beam to a completion. In a position's log probabilities the sampled token comes first, not
    the beam's.
    """
    builder = CompletionBuilder(tokenizer, request, StopAutomaton(()))
    builder.note_version(version)
    last = len(beam.tokens) - 1
    for i, token in enumerate(beam.tokens):
        builder.push(token, ends=i == last and beam.finish_reason == "stop")
    for candidate in beam.found or ():
        builder.push_logprobs(candidate.token, *candidate.logprobs)
    builder.finish(beam.finish_reason, None)
    output = builder.output
    output.index, output.cumulative_logprob = index, beam.cumulative
    return output
