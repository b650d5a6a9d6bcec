"""An engine of a fleet, and the prompts that it has."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any, Literal

from jengine.api.backend import Backend, Done
from jengine.core.request import Request, SamplingParams
from jengine.core.updates import Load
from jengine.engine.operations import Operation
from jengine.insight.recording.records import StepTotals

FIRST_RATE = 1e-4  # seconds per prompt token, before any was measured
GAIN = 0.1  # weight of a new measurement
FEWEST = 64  # tokens of a prompt that is measured: fewer take as long as any step does
BLOCK = 16  # tokens, where a load does not say the page's size
Role = Literal["decode", "prefill"]


class BackOff:
    """Delays before restarts, in seconds: doubled each time, from `first` to `longest`, and reset after an
    engine that lived for `healthy` seconds."""

    def __init__(self, first: float = 0.5, longest: float = 60.0, healthy: float = 60.0) -> None:
        self.first, self.longest, self.healthy = first, longest, healthy
        self._next = first

    def next(self, lived: float) -> float:
        """The result that `after` would have."""
        return self.first if lived >= self.healthy else self._next

    def after(self, lived: float) -> float:
        """The delay after an engine that lived for this many seconds; 0: it did not start."""
        seconds = self.next(lived)
        self._next = min(2 * seconds, self.longest)
        return seconds


class PrefixBlocks:
    """The blocks of prompts that a replica has computed lately, as far as they fit in its cache.

    A block is named by its tokens and all before it, and by what else must be equal for the cache to be
    shared.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hits(self, names: List[int]) -> int:
        """How many of a prompt's blocks, from its beginning, are known."""
        return next((i for i, name in enumerate(names) if name not in self._blocks), len(names))

    def enter(self, names: List[int], limit: int) -> None:
        """Adds a prompt's blocks, and forgets the least recently used ones above `limit`."""
        for name in reversed(names):  # beginnings are forgotten last
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > limit:
            self._blocks.popitem(last=False)


def block_names(tokens: List[int], size: int, apart: Hashable) -> list[int]:
    """Names of the whole blocks of a prompt. apart: what else must be equal."""
    name, names = hash(apart), list[int]()
    for end in range(size, len(tokens) + 1, size):
        name = hash((name, *tokens[end - size : end]))
        names.append(name)
    return names


@dataclass(slots=True)
class Rate:
    """Seconds that a prompt token takes, learned from prompts that had to wait for no other."""

    seconds: float = FIRST_RATE

    def learn(self, tokens: int, seconds: float) -> None:
        """A prompt of so many tokens, which were not in the cache, had its first result after this time."""
        if tokens >= FEWEST:
            self.seconds += GAIN * (seconds / tokens - self.seconds)


def first_token_seconds(forecast: float | None, ahead: int, tokens: int, rate: float) -> float:
    """The predicted time to a prompt's first token.

    Args:
        forecast: the replica's, for a typical prompt, which may be a second old; None: it has none.
        ahead: tokens of prompts that were sent there and have no result yet.
        tokens: of the prompt, that are not in the replica's cache.
    """
    return max(forecast or 0.0, rate * ahead) + rate * tokens


FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


@dataclass(eq=False, slots=True)
class Member[B: Backend]:
    """An engine.

    Attributes:
        since: when it became a member.
        ahead: prompt tokens that were sent to it, are not in its cache, and have no result yet.
        prompts: its unfinished prompts, by name.
        unanswered: operations that it was asked to do, and its place among those that do them.
        past, past_totals: last ones of the engines that it replaces.
    """

    backend: B
    role: Role
    back_off: BackOff
    since: float
    lives: bool = True
    ahead: int = 0
    prompts: dict[str, Prompt] = field(default_factory=dict)
    blocks: PrefixBlocks = field(default_factory=PrefixBlocks)
    unanswered: list[tuple[Answers, int]] = field(default_factory=list)
    past: Load | None = None
    past_totals: StepTotals = field(default_factory=StepTotals)

    @property
    def load(self) -> Load:
        """The load of the member's engine, with the counts of the engines before it."""
        return self.backend.load if self.past is None else self.backend.load.after(self.past)

    @property
    def totals(self) -> StepTotals:
        """The totals of the member's engine, with those of the engines before it."""
        return self.past_totals + self.backend.totals

    def new(self, prompt: Prompt) -> int:
        """How many of a prompt's tokens should not be in its cache."""
        size = self.backend.load.page_size or BLOCK
        return len(prompt.tokens) - size * self.blocks.hits(prompt.block_names(size))

    def seconds(self, prompt: Prompt, rate: Rate) -> float:
        """The predicted time to a prompt's first token."""
        forecast = self.backend.load.first_token_seconds
        return first_token_seconds(forecast, self.ahead, self.new(prompt), rate.seconds)

    def enter(self, prompt: Prompt) -> None:
        """Note a prompt that the member has got."""
        load = self.backend.load
        self.blocks.enter(prompt.block_names(load.page_size or BLOCK), load.pages)
        self.prompts[prompt.name] = prompt
        self.ahead += prompt.new

    def leave(self, prompt: Prompt) -> None:
        """A prompt has ended, or goes to another engine."""
        del self.prompts[prompt.name]
        self.ahead -= 0 if prompt.begun else prompt.new
        prompt.member = None


@dataclass(eq=False, slots=True)
class Prompt:
    """A prompt's requests.

    Attributes:
        left: ids of those that have not ended.
        member: the engine that has it.
        name: the id of its first request, when that engine got it.
        sent: when that was.
        new: tokens that were not in the engine's cache.
        alone: whether no other prompt was waiting there.
        begun: whether the engine has given a result.
        computed: whether an engine that computes prompts is done with it.
    """

    requests: tuple[Request, ...]
    left: set[str]
    member: Member[Any] | None = None
    name: str = ""
    sent: float = 0.0
    new: int = 0
    alone: bool = False
    begun: bool = False
    computed: bool = False
    blocks: dict[int, list[int]] = field(default_factory=dict)  # names, by size

    @property
    def tokens(self) -> List[int]:
        return self.requests[0].prompt_token_ids

    def first_token(self) -> Request:
        """A request that computes the prompt, and no more of it than that needs."""
        plain: dict[str, Any] = dict.fromkeys(("mask", "beams", "ttft_ms", "tpot_ms"))
        return dataclasses.replace(self.requests[0], params=FIRST_TOKEN, sample_index=0, **plain)

    def block_names(self, size: int) -> list[int]:
        """Names of its blocks of `size` tokens."""
        if size not in self.blocks:
            first = self.requests[0]
            self.blocks[size] = block_names(self.tokens, size, (first.cache_salt, first.lora_name))
        return self.blocks[size]


class Answers:
    """Calls `done` once, when all engines have answered an operation: with the joined answer, or an error."""

    def __init__(self, operation: Operation[Any], count: int, done: Done) -> None:
        self.operation, self._count, self._done, self._lock = operation, count, done, threading.Lock()
        self._answers: dict[int, tuple[Any, Exception | None]] = {}

    @property
    def waits(self) -> bool:
        """Whether an answer is missing."""
        return len(self._answers) < self._count

    def enter(self, place: int, answer: Any, error: Exception | None) -> None:
        """An engine's answer. Only its first one counts."""
        with self._lock:
            if place in self._answers:
                return
            self._answers[place] = answer, error
            if self.waits:
                return
        errors = [wrong for _, wrong in self._answers.values() if wrong is not None]
        if errors:
            self._done(None, errors[0])
        else:
            self._done(self.operation.joined([self._answers[i][0] for i in range(self._count)]), None)
