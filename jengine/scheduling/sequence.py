"""One request on its way through the scheduler: its tokens, its slot, its pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from jengine.pooling import PooledStates
from jengine.request import FinishReason, Request
from jengine.scheduling.beams import Beams
from jengine.table.program_table import VARIANTS, sampler_variant
from jengine.updates import Beam

Order = tuple[int, int, float, int]  # place under the policy, see order_of; smaller comes first, no two are equal


class State(Enum):
    WAITING = "waiting"  # owns no slot and no pages: new, or preempted
    FETCHING = "fetching"  # owns a slot and pages; some of these are on their way from the host
    PREFILLING = "prefilling"  # part of its known tokens is still to be computed
    DECODING = "decoding"  # all known tokens are computed; each step adds one
    HELD = "held"  # of beams: no row until it is known which beam comes next
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request's tokens and what it owns. Hashed by identity.

    A token is *known* once the host has read it and *in flight* between the dispatch of the step that
    samples it and `collect`. A decoding sequence always has one token that is not computed yet, known or
    in flight: it is at position `num_computed` and is the input of the next row.
    """

    request: Request
    number: int  # in the order of arrival
    family: int  # number of the first of the prompt's samples
    seed: int
    max_len: int  # tokens, prompt and output together, at which it ends
    eos_token_ids: tuple[int, ...]
    stop_token_ids: frozenset[int]  # every id that ends it
    suppressed_token_ids: tuple[int, ...]  # stop and end-of-sequence ids, none of which may come before min_tokens
    arrival: float = 0.0  # seconds on the scheduler's clock, as are all times here
    ttft: float = math.inf  # seconds from its arrival to its first token, as targeted; inf: there is no target
    tpot: float = math.inf  # and from each token to the next

    tokens: list[int]  # known: prompt and output
    num_computed: int = 0  # tokens whose keys and values are in the cache, or dispatched to be
    in_flight: int = 0  # tokens sampled by dispatched steps and not collected
    slot: int = 0  # 0 is the null slot: owns none
    state: State = State.WAITING
    num_preemptions: int = 0
    num_cached: int = 0  # tokens of the prompt that were in the cache, or computed for another sample, when it was first admitted
    scheduled: float = 0.0  # when it was first admitted
    start_by: float = math.inf  # when its prompt must begin, at the latest, for its first token to come in time
    first_token: float | None = None  # when it came, or, while it is in flight, is expected
    due: float = math.inf  # when the next token that is not planned should come
    accepted: bool = False  # its targets, if any, were promised
    late: bool = False  # its first token cannot come in time
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    pooled: PooledStates | None = None  # of an embedding's request
    beams: Beams[Sequence] | None = None  # that it is one of, while these run
    found: list[Beam] = field(default_factory=list)  # by its beam search, which has ended

    order: Order = field(init=False)  # set as it is queued
    request_id: str = field(init=False)
    client: str = field(init=False)  # whose share it takes, under policy="fair"
    prompt_len: int = field(init=False)  # tokens
    last_position: int = field(init=False)  # of the last token it may have; that token is never an input
    variant_rank: int = field(init=False)  # of its sampler variant in VARIANTS, the cheapest first
    searches: bool = field(init=False)  # whether its request asks for beams

    def __post_init__(self) -> None:
        self.request_id, self.client = self.request.request_id, self.request.client
        self.pooled = None if self.request.pooling is None else PooledStates()
        self.prompt_len = len(self.request.prompt_token_ids)
        self.last_position = self.max_len - 1
        self.searches = self.request.beams is not None
        full = self.searches or self.request.mask is not None
        self.variant_rank = VARIANTS.index("full" if full else sampler_variant(self.request.params))

    @property
    def has_target(self) -> bool:
        return self.ttft < math.inf or self.tpot < math.inf

    @property
    def slots(self) -> int:
        """That it takes to run: a beam search that does not run yet takes one for each beam."""
        beams = self.request.beams
        return beams.beam_width if beams is not None and self.state is State.WAITING else 1

    @property
    def rest(self) -> int:
        """Tokens that it may still get, beside those in flight."""
        return self.max_len - len(self.tokens) - self.in_flight

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.tokens[self.prompt_len :]
