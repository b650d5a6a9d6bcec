"""Engines that compute prompts, and others that generate, as one Backend."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

from jengine.api.backend import Backend, Done, Updates
from jengine.base.errors import EngineDead, InvalidArgument
from jengine.core.loads import combined
from jengine.core.request import FinishReason, Request, SamplingParams
from jengine.core.updates import Ended, Load, PromptScores, Update
from jengine.engine.limits import Limits
from jengine.engine.operations import Operation
from jengine.insight.recording.totals import StepTotals
from jengine.replicas.answers import Answers

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


class Disaggregated:
    """Engines of the same model that compute prompts (prefill), and others that generate (decode), as one,
    for `AsyncLLM.over`.

    A prefill engine computes the prompt and one token, which is discarded. Then the decode engine gets the
    request, with the address from which to fetch the prompt's pages, and answers it as any other. So tokens
    are those of one engine, and whatever is lost on the way, the decode engine computes.

    If the prefill engine ends, the decode engine gets its prompts. The whole ends when the decode engine
    does.

    An operation is done by both, and the answer is the decode engine's. `load` and `totals` are sums.

    Args:
        prefill, decode: engines that are not connected yet; each may be several, see `Replicas`.
        address: host:port that serves a prompt's pages, by the id of its first request; None: unknown. Called
            once for each prompt, when it is computed or given up.
        on_lost: called in any thread when the prefill engine has ended.
    """

    def __init__(
        self,
        prefill: Backend,
        decode: Backend,
        address: Callable[[str], str | None],
        on_lost: Callable[[], object] = lambda: None,
    ) -> None:
        self._decode, self._address, self._on_lost = decode, address, on_lost
        self.limits: Limits = decode.limits
        self.makes_masks = decode.makes_masks
        self.check(prefill)
        self._lock = threading.RLock()  # of what follows
        self._prefill: Backend | None = prefill  # None: it has ended
        self._past = list[tuple[Load, StepTotals]]()  # of prefill engines that have ended
        self._prompts: dict[str, _Prompt] = {}  # those being computed, by their first requests' ids
        self._of: dict[str, _Prompt] = {}  # the same, by all ids
        self._open = list[tuple[Backend, Answers]]()  # operations that prefill was asked to do
        self._deliver: Callable[[Updates], None] = lambda updates: None
        self._closing = False

    @property
    def load(self) -> Load:
        """See Backend."""
        with self._lock:
            living, past = [self._decode.load], [load for load, _ in self._past]
            if self._prefill is not None:
                living.append(self._prefill.load)
        return combined(living, past)

    @property
    def totals(self) -> StepTotals:
        """See Backend."""
        with self._lock:
            past = [totals for _, totals in self._past]
            own = past if self._prefill is None else [*past, self._prefill.totals]
        return reduce(StepTotals.__add__, own, self._decode.totals)

    def connect(self, deliver: Callable[[Updates], None], fail: Callable[[BaseException], None]) -> None:
        """See Backend."""
        self._deliver = deliver
        self._decode.connect(deliver, fail)
        if self._prefill is not None:
            self._connect(self._prefill)

    def replace(self, prefill: Backend) -> None:
        """An engine that is not connected yet takes the place of the prefill engine, which has ended.

        Raises:
            InvalidArgument: its limits are not the decode engine's.
        """
        self.check(prefill)
        with self._lock:
            if self._closing:
                prefill.quit(wait=False)
                return
            self._prefill = prefill
        self._connect(prefill)

    def add(self, *requests: Request) -> None:
        """See Backend."""
        first = requests[0]
        with self._lock:
            if self._prefill is None or not self._worth_it(first):
                self._decode.add(*requests)
                return
            # what the prefill engine needs of it, and no more
            alone = dataclasses.replace(
                first, params=ONE, mask=None, beams=None, sample_index=0, ttft_ms=None, tpot_ms=None
            )
            prompt = _Prompt([*requests])
            self._prompts[first.request_id] = prompt
            self._of |= {request.request_id: prompt for request in requests}
            try:
                self._prefill.add(alone)
            except BaseException:
                self._drop(prompt)
                raise

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        """See Backend."""
        with self._lock:
            prompt = self._of.pop(request_id, None)
            if prompt is None:
                self._decode.end(request_id, reason, stop_reason)
                return
            prompt.ended.add(request_id)
            if prompt.left or self._prefill is None:
                return
            self._drop(prompt)
            self._prefill.end(prompt.name, reason, stop_reason)

    def do(self, operation: Operation[Any], done: Done) -> None:
        """See Backend."""
        with self._lock:
            asked = [self._decode] if self._prefill is None else [self._decode, self._prefill]
            answers = Answers(asked, done)
            self._open = [(one, open_) for one, open_ in self._open if open_.waits]
            self._open += [(one, answers) for one in asked[1:]]
            for one in asked:
                one.do(operation, partial(answers.came, one))

    def quit(self, wait: bool = True) -> None:
        """See Backend."""
        with self._lock:
            self._closing = True
            both = [self._decode] if self._prefill is None else [self._decode, self._prefill]
        for one in both:
            one.quit(wait=False)
        for one in both if wait else ():
            one.quit()

    # --- prompts ------------------------------------------------------------------------------

    def _worth_it(self, request: Request) -> bool:
        """Whether a prompt has pages that another engine could compute for its request."""
        return (
            request.pooling is None
            and request.params.prompt_logprobs is None
            and request.lora_name is None
            and len(request.prompt_token_ids) > self._decode.load.page_size
        )

    def _computed(self, updates: Updates) -> None:
        """Updates of the prefill engine."""
        for update in updates:
            with self._lock:
                prompt = self._prompts.get(update.request_id)
                if prompt is None or isinstance(update, PromptScores):
                    continue
                address = self._drop(prompt)
                ended = self._go_on(prompt, address)
            if ended:
                self._deliver(ended)

    def _go_on(self, prompt: _Prompt, address: str | None) -> list[Update]:
        """Gives a prompt to the decode engine. Returns updates if that does not take it."""
        left = prompt.left
        for request in left:
            request.pages_from = address
        try:
            if left:
                self._decode.add(*left)
        except InvalidArgument as error:  # it is too large
            return [Ended(request.request_id, "error", str(error)) for request in left]
        except EngineDead:  # the whole has ended, which tells all callers
            pass
        return []

    def _drop(self, prompt: _Prompt) -> str | None:
        """Forgets a prompt. Returns where its pages are."""
        del self._prompts[prompt.name]
        for request in prompt.requests:
            self._of.pop(request.request_id, None)
        return self._address(prompt.name)

    # --- the prefill engine -------------------------------------------------------------------

    def check(self, prefill: Backend) -> None:
        """Raises InvalidArgument unless this engine has the decode engine's limits."""
        if prefill.limits != self.limits:
            raise InvalidArgument(
                "prefill", prefill.limits, f"needs the decode engine's limits: {self.limits}"
            )

    def _connect(self, prefill: Backend) -> None:
        prefill.connect(self._computed, partial(self._lost, prefill))

    def _lost(self, prefill: Backend, error: BaseException) -> None:
        """The prefill engine has ended: the decode engine computes its prompts."""
        ended = list[Update]()
        with self._lock:
            if self._prefill is prefill:
                self._prefill = None
            self._past.append((prefill.load, prefill.totals))
            prompts = [*self._prompts.values()]
            for prompt in prompts:
                self._drop(prompt)
                ended += self._go_on(prompt, None)
            open_, self._open = self._open, []
        for one, answers in open_:
            answers.came(one, None, EngineDead(str(error)))
        if ended:
            self._deliver(ended)
        if not self._closing:
            self._on_lost()


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt that a prefill engine computes.

    Attributes:
        requests: that wait for it.
        ended: ids of those that their clients have ended.
    """

    requests: List[Request]
    ended: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The id that the prefill engine knows."""
        return self.requests[0].request_id

    @property
    def left(self) -> list[Request]:
        return [request for request in self.requests if request.request_id not in self.ended]
