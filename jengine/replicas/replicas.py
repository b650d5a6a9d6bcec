"""Several engines as one Backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

from jengine.api.backend import Backend, Done, Updates
from jengine.base.errors import EngineDead, InvalidArgument
from jengine.core.loads import combined
from jengine.core.request import FinishReason, Request
from jengine.core.updates import Ended, Load, PromptScores, TokenUpdate, Update
from jengine.engine.limits import Limits
from jengine.engine.operations import Operation, ResetPrefixCache
from jengine.insight.recording.totals import StepTotals
from jengine.replicas.answers import Answers
from jengine.replicas.routing import BLOCK, PrefixBlocks, Rate, first_token_seconds, names_of


class Replicas:
    """Engines of the same model and options that answer as one, for `AsyncLLM.over`.

    A prompt, with all of its samples, goes to the replica that is predicted to give its first token soonest,
    by the replica's load and by what its prefix cache should hold. If a replica ends, prompts without a
    result go to another one; requests that had begun end with an error. The whole ends when the last replica
    does.

    An operation is done by every replica, and the answer is the first one's. `load` and `totals` are sums.

    Args:
        members: engines that are not connected yet, at least one.
        on_lost: called in any thread when a replica has ended, with its index.
        on_sent: called when a prompt is given to a replica, with its first request's id and the index.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        members: List[Backend],
        on_lost: Callable[[int], object] = lambda index: None,
        on_sent: Callable[[str, int], object] = lambda request_id, index: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = [_Member(backend) for backend in members]
        self._on_lost, self._on_sent, self._clock = on_lost, on_sent, clock
        self._lock = threading.RLock()  # of what follows, and of the members
        self._prompts: dict[str, _Prompt] = {}  # by request id
        self._deliver: Callable[[Updates], None] = lambda updates: None
        self._fail: Callable[[BaseException], None] = lambda error: None
        self._closing, self._rate = False, Rate()  # of all replicas, which are alike
        self.limits: Limits = members[0].limits
        self.makes_masks = members[0].makes_masks
        for one in members[1:]:
            self.check(one)

    @property
    def load(self) -> Load:
        """See Backend."""
        living = [member.load for member in self._members if member.lives]
        ended = [member.load for member in self._members if not member.lives]
        return combined(living, ended) if living else combined(ended)

    @property
    def totals(self) -> StepTotals:
        """See Backend."""
        return reduce(StepTotals.__add__, [member.totals for member in self._members])

    @property
    def living(self) -> list[int]:
        """Indices of the replicas that run."""
        return [i for i, member in enumerate(self._members) if member.lives]

    def connect(self, deliver: Callable[[Updates], None], fail: Callable[[BaseException], None]) -> None:
        """See Backend."""
        self._deliver, self._fail = deliver, fail
        for member in self._members:
            self._connect(member)

    def replace(self, index: int, backend: Backend) -> None:
        """An engine that is not connected yet takes the place of one that has ended.

        Raises:
            InvalidArgument: its limits are not those of the others.
        """
        self.check(backend)
        with self._lock:
            if self._closing:
                backend.quit(wait=False)
                return
            before = self._members[index]
            member = self._members[index] = _Member(backend, past=before.load, past_totals=before.totals)
        self._connect(member)

    def add(self, *requests: Request) -> None:
        """See Backend."""
        with self._lock:
            prompt = _Prompt(requests, {request.request_id for request in requests})
            self._send(prompt)
            self._prompts |= dict.fromkeys(prompt.left, prompt)

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        """See Backend."""
        with self._lock:
            prompt = self._prompts.get(request_id)
            if prompt is not None and prompt.member is not None:
                self._forget(prompt, request_id)  # nothing more is said of it
                prompt.member.backend.end(request_id, reason, stop_reason)

    def do(self, operation: Operation[Any], done: Done) -> None:
        """See Backend."""
        with self._lock:
            asked = [member for member in self._members if member.lives]
            if isinstance(operation, ResetPrefixCache):
                for member in asked:
                    member.blocks = PrefixBlocks()
            answers = Answers([member.backend for member in asked], done)
            for member in asked:
                member.open = [one for one in member.open if one.waits] + [answers]
                member.backend.do(operation, partial(answers.came, member.backend))

    def quit(self, wait: bool = True) -> None:
        """See Backend."""
        with self._lock:
            self._closing = True
        for member in self._members:
            member.backend.quit(wait=False)
        for member in self._members if wait else ():
            member.backend.quit()

    # --- prompts ------------------------------------------------------------------------------

    def _send(self, prompt: _Prompt) -> None:
        """Gives a prompt to the best replica."""
        living = [member for member in self._members if member.lives]
        if not living:
            raise EngineDead("all replicas have ended")
        # of equals, the one with fewer prompts
        member = min(living, key=lambda one: (one.seconds(prompt, self._rate), one.prompts))
        member.backend.add(*prompt.requests)
        prompt.member, prompt.sent = member, self._clock()
        prompt.alone, prompt.new = not member.ahead, member.new(prompt)
        member.enter(prompt)
        self._on_sent(prompt.requests[0].request_id, self._members.index(member))

    def _delivered(self, member: _Member, updates: Updates) -> None:
        with self._lock:
            kept = [update for update in updates if self._note(member, update)]
        if kept:
            self._deliver(kept)

    def _note(self, member: _Member, update: Update) -> bool:
        """Records an update. Returns whether the request is still the member's."""
        prompt = self._prompts.get(update.request_id)
        if prompt is None or prompt.member is not member:
            return False
        if not prompt.begun and not isinstance(update, Ended):
            prompt.begun = True
            member.ahead -= prompt.new
            if prompt.alone:
                self._rate.learn(prompt.new, self._clock() - prompt.sent)
        goes_on = isinstance(update, PromptScores) or (
            isinstance(update, TokenUpdate) and update.finish_reason is None
        )
        if not goes_on:
            self._forget(prompt, update.request_id)
        return True

    def _forget(self, prompt: _Prompt, request_id: str) -> None:
        self._prompts.pop(request_id, None)
        prompt.left.discard(request_id)
        if not prompt.left and prompt.member is not None:
            prompt.member.prompts -= 1
            prompt.member.ahead -= 0 if prompt.begun else prompt.new

    # --- replicas -----------------------------------------------------------------------------

    def check(self, backend: Backend) -> None:
        """Raises InvalidArgument unless this engine has the others' limits."""
        if backend.limits != self.limits:
            raise InvalidArgument("members", backend.limits, f"replicas need equal limits: {self.limits}")

    def _connect(self, member: _Member) -> None:
        member.backend.connect(partial(self._delivered, member), partial(self._lost, member))

    def _lost(self, member: _Member, error: BaseException) -> None:
        """A replica has ended: moves its prompts, or ends them."""
        ended = list[Update]()
        with self._lock:
            member.lives = False
            lost = {id(prompt): prompt for prompt in self._prompts.values() if prompt.member is member}
            for prompt in lost.values():
                if self.living and not prompt.begun:
                    prompt.requests = tuple(r for r in prompt.requests if r.request_id in prompt.left)
                    self._send(prompt)
                else:
                    why = f"its replica has ended: {error}"
                    ended += [Ended(request_id, "error", why) for request_id in [*prompt.left]]
                    for request_id in [*prompt.left]:
                        self._forget(prompt, request_id)
            left, index = self.living, self._members.index(member)
        for answers in member.open:
            answers.came(member.backend, None, EngineDead(str(error)))
        if not left:
            self._fail(error)
            return
        if ended:
            self._deliver(ended)
        self._on_lost(index)


@dataclass(eq=False, slots=True)
class _Member:
    """A replica.

    Attributes:
        ahead: prompt tokens that were sent to it, are not in its cache, and have no result yet.
        prompts: number of unfinished prompts that it has.
        open: operations that it was asked to do.
        past, past_totals: last ones of the engines that it replaces.
    """

    backend: Backend
    lives: bool = True
    ahead: int = 0
    prompts: int = 0
    blocks: PrefixBlocks = field(default_factory=PrefixBlocks)
    open: list[Answers] = field(default_factory=list)
    past: Load | None = None
    past_totals: StepTotals = field(default_factory=StepTotals)

    @property
    def load(self) -> Load:
        """Its engine's, with the counts of those before it."""
        return self.backend.load if self.past is None else self.backend.load.after(self.past)

    @property
    def totals(self) -> StepTotals:
        """The same."""
        return self.past_totals + self.backend.totals

    def new(self, prompt: _Prompt) -> int:
        """How many of a prompt's tokens should not be in its cache."""
        size = self.backend.load.page_size or BLOCK
        return len(prompt.tokens) - size * self.blocks.found(prompt.names(size))

    def seconds(self, prompt: _Prompt, rate: Rate) -> float:
        """The predicted time to a prompt's first token."""
        forecast = self.backend.load.first_token_seconds
        return first_token_seconds(forecast, self.ahead, self.new(prompt), rate.seconds)

    def enter(self, prompt: _Prompt) -> None:
        """It has got a prompt."""
        load = self.backend.load
        self.blocks.enter(prompt.names(load.page_size or BLOCK), load.pages)
        self.ahead, self.prompts = self.ahead + prompt.new, self.prompts + 1


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt's requests.

    Attributes:
        left: ids of those that have not ended.
        member: who has it.
        sent: when that one got it.
        new: tokens that were not in its cache.
        alone: whether no other prompt was waiting there.
        begun: whether there was a result.
    """

    requests: tuple[Request, ...]
    left: set[str]
    member: _Member | None = None
    sent: float = 0.0
    new: int = 0
    alone: bool = False
    begun: bool = False
    blocks: dict[int, list[int]] = field(default_factory=dict)  # names, by size

    @property
    def tokens(self) -> List[int]:
        return self.requests[0].prompt_token_ids

    def names(self, size: int) -> list[int]:
        """Of its blocks of so many tokens."""
        if size not in self.blocks:
            first = self.requests[0]
            self.blocks[size] = names_of(self.tokens, size, (first.cache_salt, first.lora_name))
        return self.blocks[size]
