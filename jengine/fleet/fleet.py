"""Several engines as one Backend."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from functools import partial, reduce
from typing import Any

from jengine.api.backend import Backend, Done, Updates
from jengine.base.errors import EngineDead, InvalidArgument
from jengine.core.request import FinishReason, Request
from jengine.core.updates import Ended, Load, PromptScores, TokenUpdate, Update, combined
from jengine.engine.limits import Limits
from jengine.engine.operations import LoadWeights, Operation, ResetPrefixCache
from jengine.fleet.members import Answers, BackOff, Member, PrefixBlocks, Prompt, Rate, Role
from jengine.insight.recording.records import StepTotals

log = logging.getLogger(__name__)


class Fleet[B: Backend]:
    """Engines of the same model and options that answer as one, for `AsyncLLM.over`.

    A prompt, with all of its samples, goes to the engine that is predicted to give its first token soonest,
    by the engine's load and by what its prefix cache should hold.

    With `prefill`, a prompt goes to one of those engines first, which computes it and one token. That token
    is discarded. Then an engine of `decode` gets the requests, with the address from which to fetch the
    prompt's pages, and answers them as any others. So tokens are those of one engine: what is lost on the
    way is computed again.

    If an engine ends, its prompts without a result go to another one; requests that had begun end with an
    error. With `make`, another engine is started in its place. The whole ends with the last of `decode`.

    An operation is done by all engines; its `joined` gives the answer. `load` and `totals` are sums.

    Args:
        decode: engines that are not connected yet, at least one.
        prefill: engines that compute prompts for them; not connected yet.
        address: host:port from which to fetch the pages that an engine of `prefill` has computed; None: they
            cannot be fetched.
        make: creates an engine that is not connected yet, in place of the one with this index in
            [*decode, *prefill]. It is called in a thread, again and again until it succeeds.
        back_off: creates the delays before these calls, for each engine.
        clock: monotonic seconds.

    Attributes:
        restarts: number of engines that took the place of others.
        generated: number of tokens generated so far.

    Raises:
        InvalidArgument: an engine's limits are not those of the first.
    """

    def __init__(
        self,
        decode: List[B],
        prefill: List[B] = (),
        *,
        address: Callable[[B], str | None] = lambda backend: None,
        make: Callable[[int], B] | None = None,
        back_off: Callable[[], BackOff] = BackOff,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address, self._make, self._clock = address, make, clock
        self.limits: Limits = decode[0].limits
        self.makes_masks = decode[0].makes_masks
        roles: list[tuple[Role, B]] = [("decode", backend) for backend in decode]
        roles += [("prefill", backend) for backend in prefill]
        self._members = [Member(backend, role, back_off(), clock()) for role, backend in roles]
        for member in self._members:
            self._check(member.backend)
        self.restarts = self.generated = 0
        self._lock = threading.RLock()  # of what follows, and of the members
        self._prompts: dict[str, Prompt] = {}  # by request id
        self._rates: dict[Role, Rate] = {"decode": Rate(), "prefill": Rate()}
        self._closing = threading.Event()
        self._deliver: Callable[[Updates], None] = lambda updates: None
        self._fail: Callable[[BaseException], None] = lambda error: None

    @property
    def backends(self) -> list[B]:
        """The engines, in the order of [*decode, *prefill], with those that have taken others' places."""
        return [member.backend for member in self._members]

    @property
    def lives(self) -> bool:
        """Whether an engine of `decode` runs."""
        return bool(self._living("decode"))

    @property
    def load(self) -> Load:
        """The sum of the engines' loads; of those that have ended, only counts since the start."""
        living = [member.load for member in self._members if member.lives]
        ended = [member.load for member in self._members if not member.lives]
        return combined(living, ended) if living else combined(ended)

    @property
    def totals(self) -> StepTotals:
        """The sum of the engines' totals, also of those that have ended."""
        return reduce(StepTotals.__add__, [member.totals for member in self._members])

    def connect(self, deliver: Callable[[Updates], None], fail: Callable[[BaseException], None]) -> None:
        """Connects all engines; as Backend's."""
        self._deliver, self._fail = deliver, fail
        for member in self._members:
            self._connect(member)

    def replace(self, index: int, backend: B) -> None:
        """Gives an engine that is not connected yet the place of one that has ended. After `quit`, ends it.

        Args:
            index: in [*decode, *prefill].

        Raises:
            InvalidArgument: its limits are not those of the others.
        """
        self._check(backend)
        with self._lock:
            closing, before = self._closing.is_set(), self._members[index]
            if not closing:
                member = Member(backend, before.role, before.back_off, self._clock())
                member.past, member.past_totals = before.load, before.totals
                self._members[index] = member
                self.restarts += 1
                self._connect(member)
                for operation in self._under_way():
                    backend.do(operation, lambda answer, error: None)
        if closing:
            backend.quit(wait=False)

    def add(self, *requests: Request) -> None:
        """Queues a prompt's requests; as Backend's."""
        with self._lock:
            prompt = Prompt(requests, {request.request_id for request in requests})
            self._send(prompt)
            self._prompts |= dict.fromkeys(prompt.left, prompt)

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        """Ends a request, of which nothing more is said."""
        with self._lock:
            prompt = self._prompts.get(request_id)
            if prompt is None or (member := prompt.member) is None:
                return
            self._forget(prompt, request_id)
            if member.role == "decode":
                member.backend.end(request_id, reason, stop_reason)
            elif not prompt.left:
                member.backend.end(prompt.name, reason, stop_reason)

    def do(self, operation: Operation[Any], done: Done) -> None:
        """Does an operation on all engines; as Backend's."""
        with self._lock:
            living = [member for member in self._members if member.lives]
            answers = Answers(operation, len(living), done)
            for place, member in enumerate(living):
                if isinstance(operation, ResetPrefixCache | LoadWeights):
                    member.blocks = PrefixBlocks()
                member.unanswered = [each for each in member.unanswered if each[0].waits]
                member.unanswered.append((answers, place))
                member.backend.do(operation, partial(answers.enter, place))

    def _under_way(self) -> list[Operation[Any]]:
        """Operations that engines are doing, which an engine that joins them must do, too."""
        waits = [answers for member in self._members for answers, _ in member.unanswered if answers.waits]
        return [each.operation for each in dict.fromkeys(waits) if not each.operation.in_thread]

    def quit(self, wait: bool = True) -> None:
        """Ends all engines; as Backend's."""
        with self._lock:
            self._closing.set()
            backends = self.backends
        for backend in backends:
            backend.quit(wait=False)
        for backend in backends if wait else ():
            backend.quit()

    # --- prompts ------------------------------------------------------------------------------

    def _living(self, role: Role) -> list[Member[B]]:
        return [member for member in self._members if member.lives and member.role == role]

    def _send(self, prompt: Prompt) -> None:
        """Gives a prompt to the best engine, of those that compute prompts first.

        Raises:
            InvalidArgument: it is too large.
            EngineDead: none is left.
        """
        living = self._living("prefill") if self._benefits(prompt) else []
        living = living or self._living("decode")
        if not living:
            raise EngineDead("all replicas have ended")
        rate = self._rates[living[0].role]
        # of equals, the one with fewer prompts
        member = min(living, key=lambda each: (each.seconds(prompt, rate), len(each.prompts)))
        member.backend.add(*(prompt.requests if member.role == "decode" else [prompt.first_token()]))
        prompt.member, prompt.name, prompt.sent = member, prompt.requests[0].request_id, self._clock()
        prompt.alone, prompt.new, prompt.begun = not member.ahead, member.new(prompt), False
        member.enter(prompt)

    def _benefits(self, prompt: Prompt) -> bool:
        """Whether a prompt has pages that another engine could compute for its requests."""
        first = prompt.requests[0]
        return (
            not prompt.computed
            and first.pooling is None
            and first.params.prompt_logprobs is None
            and first.lora_name is None
            and len(first.prompt_token_ids) > self._members[0].backend.load.page_size
        )

    def _send_again(self, prompt: Prompt) -> list[Update]:
        """Gives what is left of a prompt to an engine. Returns the ends of its requests if none takes it."""
        prompt.requests = tuple(r for r in prompt.requests if r.request_id in prompt.left)
        try:
            self._send(prompt)
        except InvalidArgument as error:
            return self._abandon(prompt, str(error))
        except EngineDead:  # the whole has ended, which tells all callers
            pass
        return []

    def _abandon(self, prompt: Prompt, reason: str) -> list[Update]:
        """Forgets a prompt that no engine has. Returns the ends of its requests."""
        for request_id in prompt.left:
            del self._prompts[request_id]
        return [Ended(request_id, "error", reason) for request_id in prompt.left]

    def _delivered(self, member: Member[B], updates: Updates) -> None:
        news = list[Update]()
        with self._lock:
            for update in updates:
                if member.role == "prefill":
                    news += self._computed(member, update)
                elif self._note(member, update):
                    news.append(update)
        if news:
            self._deliver(news)

    def _computed(self, member: Member[B], update: Update) -> list[Update]:
        """An engine has computed a prompt, or failed to: another one generates."""
        prompt = member.prompts.get(update.request_id)
        if prompt is None or isinstance(update, PromptScores):
            return []
        if not isinstance(update, Ended):
            self._begin(prompt, member)
        member.leave(prompt)
        prompt.computed, address = True, self._address(member.backend)
        for request in prompt.requests:
            request.pages_from = address
        return self._send_again(prompt)

    def _note(self, member: Member[B], update: Update) -> bool:
        """Records an update. Returns whether the request is still the member's."""
        prompt = self._prompts.get(update.request_id)
        if prompt is None or prompt.member is not member:
            return False
        if not isinstance(update, Ended):
            self._begin(prompt, member)
        goes_on = isinstance(update, PromptScores)
        if isinstance(update, TokenUpdate):
            self.generated += 1
            goes_on = update.finish_reason is None
        if not goes_on:
            self._forget(prompt, update.request_id)
        return True

    def _begin(self, prompt: Prompt, member: Member[B]) -> None:
        """A prompt has a result."""
        if not prompt.begun:
            prompt.begun = True
            member.ahead -= prompt.new
            if prompt.alone:
                self._rates[member.role].learn(prompt.new, self._clock() - prompt.sent)

    def _forget(self, prompt: Prompt, request_id: str) -> None:
        del self._prompts[request_id]
        prompt.left.discard(request_id)
        if not prompt.left and prompt.member is not None:
            prompt.member.leave(prompt)

    # --- engines ------------------------------------------------------------------------------

    def _check(self, backend: B) -> None:
        if backend.limits != self.limits:
            limit = f"needs the limits of the other engines: {self.limits}"
            raise InvalidArgument("members", backend.limits, limit)

    def _connect(self, member: Member[B]) -> None:
        member.backend.connect(partial(self._delivered, member), partial(self._lost, member))

    def _lost(self, member: Member[B], error: BaseException) -> None:
        """An engine has ended: moves its prompts, or ends them."""
        ended = list[Update]()
        with self._lock:
            member.lives = False
            over = not self.lives
            if over:
                self._closing.set()
            for prompt in [] if over else [*member.prompts.values()]:
                member.leave(prompt)
                if prompt.begun:
                    ended += self._abandon(prompt, f"its replica has ended: {error}")
                else:
                    ended += self._send_again(prompt)
            unanswered, index = member.unanswered, self._members.index(member)
        for answers, place in unanswered:
            answers.enter(place, None, EngineDead(str(error)))
        if over:
            self._fail(error)
            self.quit(wait=False)
            return
        if ended:
            self._deliver(ended)
        if self._make is not None and not self._closing.is_set():
            restart = partial(self._restart, index, self._make, error)
            threading.Thread(target=restart, name=f"restart-{index}", daemon=True).start()

    def _restart(self, index: int, make: Callable[[int], B], error: BaseException) -> None:
        """Makes engines until one takes the place of an engine that has ended, or the whole ends."""
        before = self._members[index]
        lived = self._clock() - before.since
        while True:
            seconds = before.back_off.after(lived)
            log.error("engine %d: %s; starting another in %.1f s", index, error, seconds)
            if self._closing.wait(seconds):
                return
            backend: B | None = None
            try:
                backend = make(index)
                self.replace(index, backend)
            except Exception as wrong:  # of any kind: the others answer, and the next one may start
                if backend is not None:  # it is refused
                    backend.quit(wait=False)
                error, lived = wrong, 0.0
            else:
                return
