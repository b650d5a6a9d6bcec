"""An answer as a sequence of blocks: reasoning, text and tool calls, each open until the next one begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from jengine import CompletionOutput, RequestOutput
from jengine.serving.http.chat_service import Chat
from jengine.serving.parsers.events import Arguments, Content, Event, Reasoning, ToolCallStart, joined
from jengine.serving.requests.tracking import new_id

Kind = Literal["reasoning", "text", "call"]
KINDS: dict[type[Event], Kind] = {Reasoning: "reasoning", Content: "text", Arguments: "call"}


@dataclass(slots=True)
class Block:
    """A part of an answer.

    Attributes:
        index: its place in the answer.
        id: unique, without a prefix.
        name: of the tool, for a call.
        pieces: its text so far.
        logprobs: log probabilities of its tokens, as JSON, if a text's are wanted.
    """

    index: int
    kind: Kind
    id: str
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; of a call: its arguments as JSON."""
        return "".join(self.pieces)


class Step(NamedTuple):
    """What happens to a block. `text`: what it grows by; `logprobs`: see Block."""

    what: Literal["opens", "grows", "closes"]
    block: Block
    text: str = ""
    logprobs: Sequence[msgspec.Raw] = ()


class Blocks:
    """Turns the events of a completion into blocks.

    Args:
        events: the first ones, or those of a whole answer.

    Attributes:
        all: the blocks so far.
    """

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self.add(events)

    def add(self, events: Sequence[Event]) -> list[Step]:
        steps: list[Step] = []
        for event in events:
            if isinstance(event, ToolCallStart):
                steps += [*self.close(), self._opened("call", event.name)]
                continue
            kind = KINDS[type(event)]
            if self._open is None or self._open.kind != kind:
                steps += [*self.close(), self._opened(kind)]
            assert self._open is not None
            self._open.pieces.append(event.text)
            steps.append(Step("grows", self._open, event.text))
        return steps

    def close(self) -> list[Step]:
        """The answer has ended, or another block begins."""
        steps = [] if self._open is None else [Step("closes", self._open)]
        self._open = None
        return steps

    @property
    def called(self) -> bool:
        """Whether a tool is called."""
        return any(block.kind == "call" for block in self.all)

    def text(self, kind: Kind) -> str:
        """The text of all blocks of a kind."""
        return "".join(block.text for block in self.all if block.kind == kind)

    def _opened(self, kind: Kind, name: str = "") -> Step:
        self._open = Block(len(self.all), kind, new_id(), name)
        self.all.append(self._open)
        return Step("opens", self._open)


class BlockReader:
    """Reads the outputs (of kind delta) of a request for one completion.

    Attributes:
        blocks: those so far.
        tokens: generated so far.
        last: the last output, once there is one.
        completion: the last part of the completion, once there is one.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat, self._parser = chat, chat.parser()
        self.blocks, self.tokens = Blocks(), 0
        self.last: RequestOutput | None = None
        self.completion: CompletionOutput | None = None

    async def take(self, output: RequestOutput) -> list[Step]:
        """What an output changes."""
        self.last, steps = output, []
        for completion in output.outputs:
            self.completion = completion
            self.tokens += len(completion.token_ids)
            steps += self._read(completion)
        return steps

    def _read(self, completion: CompletionOutput) -> list[Step]:
        return self._push(completion.text, completion.finish_reason is not None)

    def _push(self, text: str, ended: bool) -> list[Step]:
        events = self._parser.push(text)
        if ended:
            events = joined([*events, *self._parser.finish()])
        steps = self.blocks.add(self._chat.shown(events))
        return [*steps, *self.blocks.close()] if ended else steps
