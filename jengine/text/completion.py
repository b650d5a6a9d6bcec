"""Builds a CompletionOutput from a request's tokens as they arrive: text, stop strings, log probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import overload

from jengine.core.request import CompletionOutput, FinishReason, Logprob, Request
from jengine.core.updates import Beam, TokenLogprobs
from jengine.core.weights import Version
from jengine.text.tokenizer import Tokenizer

MOST_PENDING = 256  # tokens that wait for their text, so that making it never takes long


@dataclass(slots=True, eq=False, repr=False)
class StopAutomaton:
    """A state of compiled stop strings: the longest prefix of one with which the text so far ends. `of` gives
    the first state, which is not changed, so it can be used for any number of texts.
    """

    depth: int = 0  # characters of that prefix
    next: dict[str, StopAutomaton] = field(default_factory=dict)
    fail: StopAutomaton | None = None  # the longest proper suffix that is a prefix too; None: the first
    stop: str | None = None  # the longest stop that ends here

    @classmethod
    def of(cls, stops: tuple[str, ...]) -> StopAutomaton:
        """Aho and Corasick, "Efficient string matching", 1975. Takes about 1 us a character."""
        root = cls()
        for stop in stops:
            node = root
            for character in stop:
                node = node.next.setdefault(character, cls(node.depth + 1))
            node.stop = stop
        nodes = deque(root.next.values())
        for node in nodes:
            node.fail = root
        while nodes:
            node = nodes.popleft()
            for character, child in node.next.items():
                fail = node.fail
                while fail is not None and character not in fail.next:
                    fail = fail.fail
                child.fail = fail.next[character] if fail is not None else root
                child.stop = child.stop or child.fail.stop
                nodes.append(child)
        return root


class StopStrings:
    """Cuts a text at the first completed stop string, reading character by character.

    So the result does not depend on how the text was cut into pieces. If several stop strings end at the same
    place, the longest counts. Text is held back only while it may still become part of a stop string. Each
    character is one step of an Aho-Corasick automaton: a push costs O(len(delta) + longest stop).
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self._root = self._state = automaton
        self._held = ""

    def push(self, delta: str, *, early: bool = False) -> tuple[str, str | None]:
        """Returns text that is safe to emit, and the stop string that was completed or None. After a stop,
        push no more.

        early: no stop may be completed in this text; one that begins in it and ends later may.
        """
        if not self._root.next:  # there are no stop strings
            return delta, None
        text, state = self._held + delta, self._state
        for end, character in enumerate(delta, start=len(self._held) + 1):
            while character not in state.next and state.fail is not None:
                state = state.fail
            state = state.next.get(character, self._root)
            if state.stop is not None and not early:
                self._state, self._held = self._root, ""
                return text[: end - len(state.stop)], state.stop
        safe = len(text) - state.depth
        self._state, self._held = state, text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """Returns the text held back, if the output ended for another reason."""
        held, self._held, self._state = self._held, "", self._root
        return held


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
    builder = CompletionBuilder(tokenizer, request, StopAutomaton())
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
