"""Derives predictions for requests from a scheduler's state; see forecast.py."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as List
from typing import NamedTuple

from jengine.core.request import Request
from jengine.scheduling.forecasts.forecast import Forecast, Machine, Prediction, SequenceGroup
from jengine.scheduling.requests.sequence import Sequence, State, salt_of
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step_plan import Work
from jengine.table.program_table import VARIANTS

FRESH = 0.25  # seconds for which a result is reused
SHARE = 0.01  # maximum share of time spent on this
TYPICAL = 0.5  # quantile of output lengths
TYPICAL_PROMPT, TYPICAL_OUTPUT = 512.0, 256  # tokens, used until a request has arrived or ended
PROMPT_GAIN = 0.02  # weight of each prompt in the mean


class FirstTokenOutlook:
    """Seconds until a typical request would get its first token. Results are reused, so ask often."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._prompt = scheduler, TYPICAL_PROMPT
        self._seconds: float | None = None
        self._until, self._idle = -math.inf, True

    def came(self, prompt: int) -> None:
        """Records the prompt length of a new request."""
        self._prompt += PROMPT_GAIN * (prompt - self._prompt)

    def first_token_seconds(self) -> float | None:
        """At most FRESH seconds old, or older if computing it takes more than SHARE of the time. Thread-safe.

        If computing it fails, that is tried again after that time. None: the last computation failed.
        """
        now, idle = time.perf_counter(), not self._scheduler.has_work
        if now > self._until or idle != self._idle:
            seconds = None
            try:
                (prediction,) = expect(self._scheduler, [self._typical()])
                seconds = prediction.first_token
            finally:
                after = time.perf_counter()
                self._seconds, self._until, self._idle = (
                    seconds,
                    after + max(FRESH, (after - now) / SHARE),
                    idle,
                )
        return self._seconds

    def _typical(self) -> Hypothetical:
        scheduler = self._scheduler
        longest = scheduler.limits.max_model_len
        prompt = min(max(round(self._prompt), 1), longest - 1)
        return Hypothetical(
            prompt,
            max(
                scheduler.acceptance.lengths.expected_rest(0, min(TYPICAL_OUTPUT, longest - prompt), TYPICAL),
                1,
            ),
        )


class Hypothetical(NamedTuple):
    """A hypothetical request.

    Attributes:
        prompt: tokens.
        output: tokens that each of its samples is expected to generate.
        cached: prompt tokens in the prefix cache.
    """

    prompt: int
    output: int
    samples: int = 1
    cached: int = 0


def expect(scheduler: Scheduler, requests: List[Hypothetical]) -> list[Prediction]:
    """Predictions for requests that would arrive now, in this order, if none followed them.

    The machine's load is assumed to stay as it is. Thread-safe.
    """
    running, waiting = scheduler.registry.snapshot()
    new: list[SequenceGroup] = []
    for number, (prompt, output, samples, cached) in enumerate(requests):
        new.append(SequenceGroup(min(cached, prompt - 1), prompt, output, 1, number))
        if samples > 1:
            new.append(SequenceGroup(prompt - 1, prompt, output, samples - 1, len(requests) + number))
    predictions = Forecast(
        _machine(scheduler, running), _jobs(scheduler, running), _jobs(scheduler, waiting), new
    ).run()
    lasts = [
        predictions.get(len(requests) + number, predictions[number]).last_token
        for number in range(len(requests))
    ]
    return [
        Prediction(predictions[number].first_token, max(predictions[number].last_token, last))
        for number, last in enumerate(lasts)
    ]


def hypothetical(scheduler: Scheduler, request: Request, samples: int = 1) -> Hypothetical:
    """Describes a request: its cached pages now, and the typical output length if a stop token may end it."""
    tokens, cached = request.prompt_token_ids, 0
    output = _rest(scheduler, request, 0, scheduler.limits.max_len(request) - len(tokens))
    if request.params.prompt_logprobs is None:
        keys = tokens if request.images is None else request.images.keyed(tokens)
        lora = scheduler.registry.loras.by_name.get(request.lora_name or "")
        cached = scheduler.blocks.match(keys, salt_of(request, lora)).tokens
    return Hypothetical(len(tokens), output, samples, cached)


def _rest(scheduler: Scheduler, request: Request, generated: int, limit: int) -> int:
    """Tokens that a request is expected to generate beyond those that it has, at most up to its limit."""
    params = request.params
    surely = params.ignore_eos and not params.stop and not params.stop_token_ids
    return max(
        limit - generated
        if surely
        else scheduler.acceptance.lengths.expected_rest(generated, limit, TYPICAL),
        1,
    )


def _jobs(scheduler: Scheduler, sequences: List[Sequence]) -> list[SequenceGroup]:
    return [_job(scheduler, sequence) for sequence in sequences if sequence.rest > 0]


def _job(scheduler: Scheduler, sequence: Sequence) -> SequenceGroup:
    known = len(sequence.tokens) + sequence.in_flight
    generated = known - sequence.prompt_len
    rest = _rest(scheduler, sequence.request, generated, generated + sequence.rest)
    return SequenceGroup(
        known if sequence.state in (State.DECODING, State.HELD) else sequence.num_computed, known, rest
    )


def _machine(scheduler: Scheduler, running: List[Sequence]) -> Machine:
    costs, ready, table, blocks = (
        scheduler.predictor.costs,
        scheduler.predictor.ready,
        scheduler.table,
        scheduler.blocks,
    )
    pages = blocks.pages_of(max([len(sequence.tokens) for sequence in running], default=1))
    variant = VARIANTS[max([sequence.variant_rank for sequence in running], default=0)]
    gain = scheduler.speculation.gain
    # (rows, tiles): seconds of the device without work, and of the host
    known: dict[tuple[int, int], tuple[float, float]] = {}

    def seconds(rows: int, tiles: int, work: Work) -> float:
        """The longer of host and device, which overlap. Drafts shorten a row's token as lately."""
        if rows and tiles and scheduler.composition.apart:  # two steps
            return seconds(rows, 0, work._replace(attended=0)) + seconds(
                0, tiles, Work(attended=work.attended)
            )
        if (rows, tiles) not in known:
            trunk = ready.trunk(
                min(rows or (0 if tiles else 1), ready.max_rows),
                min(tiles, ready.max_tiles),
                pages,
                adapted=scheduler.predictor.adapted,
            )
            known[rows, tiles] = (
                costs.seconds(trunk, ready.sampler(trunk, variant)),
                sum(costs.host_seconds(rows + tiles, trunk.tiles)),
            )
        device, host = known[rows, tiles]
        longer = max(device + costs.drift * costs.slopes.seconds(work), host)
        return longer / gain if rows else longer

    def of_cohorts(rows: int, tiles: int, work: Work) -> float:
        """In a pipeline, the same for the steps of all cohorts: each has a part of the rows and tiles."""
        count = scheduler.cohorts.count
        part = Work(work.context // count, work.longest, work.attended // count)
        return count * seconds(-(-rows // count), -(-tiles // count), part)

    return Machine(
        max_rows=min(scheduler.registry.max_num_seqs, ready.max_rows),
        tile_size=table.tile_size,
        tile_buckets=ready.tile_buckets,
        max_tokens=scheduler.predictor.max_num_batched_tokens,
        page_size=scheduler.blocks.page_size,
        pages=blocks.capacity - blocks.owned,
        groups=len(blocks.windows),
        seconds=seconds if scheduler.cohorts.stages == 1 else of_cohorts,
        most_on_rows=scheduler.rows_or_tiles.max_rows,
        start=scheduler.busy_seconds,
    )
