"""One request in the scheduler: its tokens, its slot, its pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from jengine.core.images import PromptImages, prompt_key
from jengine.core.pooling import PooledStates
from jengine.core.request import FinishReason, Request
from jengine.core.updates import Beam
from jengine.scheduling.pages.block_table import LoraSalt, Ranges, Salt
from jengine.scheduling.requests.beams import Beams
from jengine.scheduling.requests.loras import Lora
from jengine.table.program_table import VARIANTS, sampler_variant

Order = tuple[int, int, float, int]  # place in the order, see Registry; smaller comes first, no two are equal


class State(Enum):
    WAITING = "waiting"  # owns no slot and no pages: new, or preempted
    FETCHING = "fetching"  # owns a slot and pages; some pages are being copied from the host
    PREFILLING = "prefilling"  # some of its known tokens are not computed yet
    DECODING = "decoding"  # all known tokens are computed; each step adds one
    HELD = "held"  # a beam, without a row until its successor is known
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request's tokens and resources. Hashed by identity.

    A token is *known* once the host has read it. It is *in flight* between the dispatch of the step that
    samples it and `collect`. A decoding sequence always has one token that is not computed yet, known or in
    flight. Its position is `num_computed`, and it is the input of the next row.

    A single step with a row of several tokens may yield fewer of them. Until it is collected, `num_computed`
    and `in_flight` are upper bounds, as pages and budgets need; `certain` is a lower bound.
    """

    request: Request
    number: int  # in order of arrival
    family: int  # number of the first of the prompt's samples
    seed: int
    max_len: int  # total tokens, prompt and output, at which it ends
    eos_token_ids: tuple[int, ...]
    stop_token_ids: frozenset[int]  # all ids that end it
    # stop and end-of-sequence ids, which are not allowed before min_tokens
    suppressed_token_ids: tuple[int, ...]
    arrival: float = 0.0  # seconds on the scheduler's clock, as are all times here
    queued: float = 0.0  # time at which the engine queued it
    ttft: float = math.inf  # target for seconds from arrival to the first token; inf: no target
    tpot: float = math.inf  # target for seconds between tokens

    tokens: list[int]  # known: prompt and output
    # tokens whose keys and values are in the cache, or will be written by dispatched steps
    num_computed: int = 0
    in_flight: int = 0  # tokens sampled by dispatched steps and not yet collected
    tentative: int = 0  # how many of these may not come
    slot: int = 0  # 0, the null slot: owns none
    state: State = State.WAITING
    num_preemptions: int = 0
    expected_cached: int = 0  # prompt tokens that were cached when it came, if its first one has a target
    num_cached: int = 0  # prompt tokens that were cached, or computed for another sample, at first admission
    scheduled: float = 0.0  # time of first admission
    start_by: float = math.inf  # latest time at which its prompt must start for its first token to be in time
    first_token: float | None = None  # arrival time of the first token, predicted while it is in flight
    due: float = math.inf  # time at which the next unplanned token is due
    accepted: bool = False  # whether its targets, if any, were promised
    late: bool = False  # whether its first token can no longer be in time
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    pooled: PooledStates | None = None  # of a request for an embedding
    beams: Beams[Sequence] | None = None  # the running beam search that it belongs to
    lora: Lora | None = None  # that its request uses
    found: list[Beam] = field(default_factory=list)  # result of its finished beam search

    order: Order = field(init=False)  # set when it is queued
    request_id: str = field(init=False)
    client: str = field(init=False)  # whose share it uses, under policy="fair"
    prompt_len: int = field(init=False)  # tokens
    last_position: int = field(init=False)  # position of its last possible token, which is never an input
    variant_rank: int = field(init=False)  # index of its sampler variant in VARIANTS, which is sorted by cost
    searches: bool = field(init=False)  # whether its request is a beam search
    salt: Salt = field(init=False)  # which its cached pages are found by
    images: PromptImages | None = field(init=False)  # of its prompt
    whole: Ranges = ()  # of its prompt, that a step computes as a whole
    prefix: bool = False  # whether the tokens of its prompt see each other
    _keys: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.request_id, self.client = self.request.request_id, self.request.client
        self.pooled = None if self.request.pooling is None else PooledStates()
        self.images = self.request.images
        self.prompt_len = len(self.request.prompt_token_ids)
        self.last_position = self.max_len - 1
        self.searches = self.request.beams is not None
        self.salt = salt_of(self.request, self.lora)
        full = self.searches or self.request.mask is not None
        self.variant_rank = VARIANTS.index("full" if full else sampler_variant(self.request.params))

    @property
    def leader(self) -> Sequence:
        """Its request's own sequence: itself, or that of its running beam search."""
        return self if self.beams is None else self.beams.leader

    @property
    def place(self) -> int:
        """On the devices, of its adapter, from 1; 0: it has none."""
        return 0 if self.lora is None else self.lora.place

    @property
    def has_target(self) -> bool:
        return self.ttft < math.inf or self.tpot < math.inf

    @property
    def keys(self) -> list[int]:
        """What its cached pages are found by, beside the salt: its tokens, with ids for images' content; the
        first stands for the whole prompt if that is what its keys and values depend on.
        """
        if self.images is None and not self.prefix:
            return self.tokens
        if self.searches or not self._keys:  # beams exchange their tokens
            self._keys = [*self.tokens] if self.images is None else self.images.keyed(self.tokens)
            if self.prefix:
                self._keys[0] = prompt_key(self._keys[: self.prompt_len])
        self._keys += self.tokens[len(self._keys) :]
        return self._keys

    @property
    def slots(self) -> int:
        """Number of slots that it needs to run. A beam search that is not running needs one for each beam."""
        beams = self.request.beams
        return beams.beam_width if beams is not None and self.state is State.WAITING else 1

    @property
    def certain(self) -> int:
        """Number of tokens whose keys and values are, or will certainly be, in the cache."""
        return self.num_computed - self.tentative

    def plan_row(self, length: int, least: int) -> None:
        """A step with a row of this many tokens is planned, which yields at least `least` of them."""
        self.num_computed += length
        self.in_flight += length
        self.tentative += length - least
        if length > 1 and self.tpot < math.inf:
            self.due += (length - 1) * self.tpot

    def settle_row(self, length: int, least: int, results: int) -> None:
        """Takes back the tokens of such a row that did not come; `results` did."""
        missing = length - results
        self.in_flight -= missing
        self.tentative -= length - least
        if self.state is State.DECODING:  # a preempted one will compute all of its tokens again
            self.num_computed -= missing
        if missing and self.tpot < math.inf:
            self.due -= missing * self.tpot

    @property
    def rest(self) -> int:
        """Number of tokens that it may still get after those in flight."""
        return self.max_len - len(self.tokens) - self.in_flight

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.tokens[self.prompt_len :]


def salt_of(request: Request, lora: Lora | None) -> Salt:
    """What a request's cached pages are found by, beside its keys. lora: its adapter."""
    salt = request.cache_salt
    return salt if lora is None else LoraSalt(lora.number, lora.name, salt)
