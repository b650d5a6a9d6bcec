"""Accepted requests are on time if costs are as predicted."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from jengine.core.request import Request, SamplingParams
from jengine.core.scheduling_options import SchedulingOptions
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.step_plan import NO_WORK, Work
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey
from tests.schedulers import make_scheduler
from tests.scheduling.strict_device import Loop
from tests.scheduling.virtual_loop import VirtualLoop

TILE, PAGE, MODEL_LEN, SEQS = 8, 4, 96, 12
TABLE = ProgramTable.build(max_num_seqs=SEQS, max_num_batched_tokens=SEQS + 8 * TILE, tile_size=TILE)


class Linear(StepCosts):
    """Costs that grow with rows, tiles and contexts at random rates: in milliseconds, like the targets."""

    def __init__(self, step: float, row: float, tile: float, context: float) -> None:
        super().__init__(TABLE)
        self.rates = step, row, tile, context

    def seconds(self, trunk: TrunkKey, sampler: SamplerKey | None = None, work: Work = NO_WORK) -> float:
        step, row, tile, context = self.rates
        return 1e-3 * (
            step + row * trunk.rows + tile * trunk.tiles + context * (work.context + work.attended)
        )


def serve(costs, requests, lengths, options, num_pages=400, ahead=1, budget=SEQS + 8 * TILE, cached=False):
    engine = VirtualLoop(costs, ahead, lengths)
    scheduler = make_scheduler(
        TABLE,
        page_size=PAGE,
        num_pages=num_pages,
        max_num_seqs=SEQS,
        max_num_batched_tokens=budget,
        max_model_len=MODEL_LEN,
        costs=costs,
        clock=engine.clock,
        prefix_caching=cached,
        options=SchedulingOptions(**options),
    )
    engine.run(scheduler, requests)
    return engine, scheduler


def random_work(draw, known):
    """Bursts of requests with targets that are just possible, or just impossible."""
    requests, lengths, at = [], {}, 0.0
    for i in range(25):
        at += draw.random() * draw.choice([0.0, 0.02, 0.1])
        prompt, output = draw.randint(1, 60), draw.randint(1, 30)
        targets = {
            "ttft_ms": draw.choice([None, 100.0, 500.0, 1500.0]),
            "tpot_ms": draw.choice([None, 8.0, 30.0, 60.0]),
        }
        exact = known and draw.random() < 0.7
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=exact)
        tokens = [100 + i, *range(1, prompt)]
        requests.append(
            Request(request_id=str(i), prompt_token_ids=tokens, params=params, arrival=at, **targets)
        )
        if not exact and draw.random() < 0.5:
            lengths[str(i)] = draw.randint(1, output)
    return requests, lengths


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    known=st.booleans(),
    costs=st.builds(Linear, st.floats(0.1, 10), st.floats(0, 0.5), st.floats(0.1, 20), st.floats(0, 0.02)),
    ahead=st.sampled_from([0, 1]),
    num_pages=st.sampled_from([60, 400]),
)
def test_with_exact_costs_no_accepted_request_misses_its_target(seed, known, costs, ahead, num_pages):
    requests, lengths = random_work(random.Random(seed), known)
    engine, scheduler = serve(
        costs, requests, lengths, {"strategy": "latency", "on_late": "reject"}, num_pages, ahead
    )
    assert scheduler.acceptance.goodput.missed == 0, "an accepted request missed its target"
    assert scheduler.registry.num_preemptions == 0
    rejected = [sequence for sequence in engine.sequences if sequence.stop_reason == "rejected"]
    assert len(rejected) == scheduler.acceptance.goodput.rejected and all(
        s.has_target and not s.output_token_ids for s in rejected
    )
    assert all(
        sequence.finish_reason in ("stop", "length")
        for sequence in engine.sequences
        if sequence not in rejected
    )


def test_promises_are_not_kept_by_rejecting_everything():
    """More requests are on time than if all were served in order of arrival, at the same costs."""
    draw, met = random.Random(1), {"throughput": 0, "serve": 0, "reject": 0}
    for _ in range(15):
        costs = Linear(
            draw.uniform(0.1, 10), draw.uniform(0, 0.5), draw.uniform(0.1, 20), draw.uniform(0, 0.01)
        )
        work = draw.randint(0, 10**6)
        for name in met:
            requests, lengths = random_work(random.Random(work), known=True)
            options = (
                {"strategy": "throughput"}
                if name == "throughput"
                else {"strategy": "latency", "on_late": name}
            )
            met[name] += serve(costs, requests, lengths, options)[1].acceptance.goodput.met
    assert met["reject"] > met["serve"] > met["throughput"] > 0


def test_a_sequence_whose_last_token_is_in_flight_asks_for_no_page_beyond():
    """The programs' largest bucket holds the longest sequence."""
    limits = {
        "max_model_len": 30,
        "tile_size": 1,
        "page_size": 2,
        "num_pages": 200,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
    }
    one = Loop(**limits, page_buckets=(1, 8, 15), strategy="latency")
    sequence = one.add([3] * 27, max_tokens=None, ignore_eos=True, targets={"ttft_ms": 1e6})
    while len(sequence.tokens) + sequence.in_flight < 30:
        one.step(ahead=2)
    one.add([4] * 5, max_tokens=2, targets={"ttft_ms": 1e6})
    one.drain(2)


def test_a_cached_prompt_is_promised_what_it_takes() -> None:
    """A conversation's second turn: computing all of it would take too long."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    first = [*range(2, 62)]
    requests = [
        Request(request_id="first", prompt_token_ids=first, params=params),
        Request(
            request_id="second", prompt_token_ids=[*first, 70, 71], params=params, arrival=10.0, ttft_ms=100.0
        ),
    ]
    costs = Linear(1.0, 0.0, 20.0, 0.0)
    for on_late in "reject", "serve":
        options = {"strategy": "latency", "on_late": on_late}
        engine, scheduler = serve(costs, requests, {}, options, cached=True)
        assert [sequence.finish_reason for sequence in engine.sequences] == ["length", "length"]
        assert scheduler.acceptance.goodput.met == 1 and not any(s.late for s in engine.sequences)
