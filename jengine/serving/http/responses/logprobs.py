"""Which tokens are those of a message: the others belong to reasoning, calls and markers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from jengine import CompletionOutput, RequestOutput
from jengine.serving.calls.portions import Portioned
from jengine.serving.http.blocks import BlockReader, Step
from jengine.serving.http.chat_request import Chat
from jengine.serving.http.logprobs import TokenTexts, token_entries

Token = tuple[int, msgspec.Raw | None]  # its number of characters, and its entry if it is to be shown


class LogprobReader(BlockReader):
    """Reads outputs token by token, and gives blocks of text the log probabilities of their tokens."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        tokenizer, hides = chat.llm.tokenizer, chat.params.skip_special_tokens
        self._texts = TokenTexts(tokenizer, as_ids=False)
        self._hidden = tokenizer.special_ids if hides else frozenset[int]()
        self._detokenizer = tokenizer.detokenizer(hides)
        self._coming: deque[Token] = deque()  # whose text has not come yet
        self._parsed: list[Token] = []  # whose text no block has yet

    async def expect(self, output: RequestOutput, portioned: Portioned) -> None:
        """Must be called with each output before `take`."""
        top = self._chat.body.get("top_logprobs", 0)
        for completion in output.outputs:
            entries = await token_entries(portioned, completion.logprobs or (), top, self._texts)
            for token, entry in zip(completion.token_ids, entries, strict=True):
                size = len(self._detokenizer.push([token]))
                self._coming.append((size, None if token in self._hidden else entry))

    def _read(self, completion: CompletionOutput) -> list[Step]:
        steps = []
        for text in self._pieces(completion.text):
            steps += self._push(text, ended=False)
        return [*steps, *(self._push("", ended=True) if completion.finish_reason is not None else ())]

    def _push(self, text: str, ended: bool) -> list[Step]:
        steps = super()._push(text, ended)
        size = sum(len(step.text) for step in steps)
        tokens = self._last_tokens(size) if size else deque()
        return [self._with_logprobs(step, tokens) for step in steps]

    def _with_logprobs(self, step: Step, tokens: deque[Token]) -> Step:
        """The step with those of the next tokens that it takes."""
        size, entries = len(step.text), []
        while tokens and size > 0:
            length, entry = tokens.popleft()
            size -= length
            entries += [] if entry is None else [entry]
        if step.block.kind != "text":
            return step
        step.block.logprobs += entries
        return step._replace(logprobs=entries)

    def _pieces(self, text: str) -> Iterator[str]:
        """The text by tokens. A text may end before its tokens do, at a stop string."""
        while text and self._coming:
            size, entry = self._coming.popleft()
            self._parsed.append((min(size, len(text)), entry))
            if size > len(text):
                self._coming.appendleft((size - len(text), None))
            if size:
                yield text[:size]
            text = text[size:]
        if text:
            yield text

    def _last_tokens(self, size: int) -> deque[Token]:
        """The last tokens whose text has been parsed, as many as have `size` characters. Forgets those
        before, which were markers.
        """
        first = len(self._parsed)
        while first and (size > 0 or not self._parsed[first - 1][0]):
            first -= 1
            size -= self._parsed[first][0]
        tokens, self._parsed = deque(self._parsed[first:]), []
        return tokens
