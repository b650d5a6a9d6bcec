"""Reports about random queues: each ends, within a number of iterations that does not depend on what the
requests are.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from jengine.core.request import Request, SamplingParams
from jengine.core.scheduling_options import OnLate, SchedulingOptions
from jengine.insight.explanations.explain import explain
from jengine.insight.recording.trace import Trace
from jengine.scheduling.forecasts.expectations import Hypothetical, expect, hypothetical
from jengine.scheduling.forecasts.forecast import Forecast, Machine, SequenceGroup
from jengine.scheduling.promises import acceptance
from jengine.scheduling.promises.acceptance import EFFORT
from jengine.scheduling.step_plan import Work
from tests.iterations import TooManyIterations, counted_iterations
from tests.observe.virtual import MS, Virtual, make_virtual

COUNTS = [pytest.param(200, id="200"), pytest.param(10_000, id="10000", marks=pytest.mark.full)]
ONCE, EACH = 12_000, 40  # most iterations of a forecast, and in addition for each request in the queue
PLANNED = 4 * EFFORT, 400  # most iterations of a step, and in addition for each request


def draw_machine(draw: random.Random) -> Machine:
    tile = draw.choice([16, 32, 64])
    base, row, prompt = (draw.choice([0.0, MS]) for _ in range(3))

    def seconds(rows: int, tiles: int, work: Work) -> float:
        return base + row * rows + prompt * tiles + 1e-8 * work.attended

    return Machine(
        max_rows=draw.choice([1, 3, 16, 64, 256]),
        tile_size=tile,
        tile_buckets=draw.choice([(1,), (1, 2, 4), (1, 2, 4, 8, 16), (3, 7)]),
        max_tokens=draw.choice([256 + tile, 512, 2048]),
        page_size=draw.choice([1, 16]),
        pages=draw.randint(50, 2048),
        groups=draw.choice([1, 3]),
        seconds=seconds,
    )


def draw_jobs(draw: random.Random, most: int, longest: int, decoding: bool) -> list[SequenceGroup]:
    jobs = []
    for _ in range(draw.randint(0, most)):
        end = draw.randint(1, longest)
        jobs.append(
            SequenceGroup(
                draw.choice([0, end - 1, end] if decoding else [0, end - 1]),
                end,
                draw.choice([1, 600, draw.randint(1, 1000)]),
            )
        )
    return jobs


@pytest.mark.parametrize("queues", COUNTS)
def test_forecasts_end(queues: int) -> None:
    """Queues of short prompts, of which one token or all are left, and a few long ones."""
    for seed in range(queues):
        draw = random.Random(seed)
        machine, longest = draw_machine(draw), draw.choice([1, 4, 50, 50, 20_000])
        running = draw_jobs(draw, machine.max_rows, longest, decoding=True)
        waiting = draw_jobs(draw, draw.choice([0, 5, 400]), longest, decoding=False)
        new = [
            SequenceGroup(0, draw.randint(1, longest), draw.randint(1, 256), draw.choice([1, 1, 64]), number)
            for number in range(draw.randint(1, 3))
        ]
        with counted_iterations(100_000) as counts:
            forecast = Forecast(machine, running, waiting, new)
            found = forecast.run()
        assert forecast.iterations <= forecast.limit, seed
        assert counts.total() <= ONCE + EACH * (len(running) + len(waiting) + len(new)), seed
        assert sorted(found) == [*range(len(new))], seed
        assert all(0.0 <= one.first_token <= one.last_token < math.inf for one in found.values()), seed


def draw_engine(draw: random.Random, patch: pytest.MonkeyPatch) -> Virtual:
    batching = draw.choice(["continuous", "continuous", "dynamic"])
    options = SchedulingOptions(
        policy=draw.choice(["fcfs", "priority", "fair"]),
        strategy=draw.choice(
            ["throughput", "latency", "memory", "auto"]
            if batching == "continuous"
            else ["throughput", "memory"]
        ),
        on_late=draw.choice(["serve", "reject"]),
        ttft_ms=draw.choice([None, 50.0]),
        tpot_ms=draw.choice([None, 20.0]),
        batching=batching,
    )
    places, pages = draw.choice([1, 4, 16, 64]), draw.choice([150, 1000])
    return make_virtual(patch, places=places, pages=pages, tile=draw.choice([16, 64]), options=options)


def draw_requests(draw: random.Random, number: int, now: float, longest: int) -> list[Request]:
    """The samples of a prompt."""
    prompt = [draw.randint(0, 9) for _ in range(draw.randint(1, longest))]
    params = SamplingParams(max_tokens=draw.choice([1, 20, 600]), ignore_eos=draw.random() < 0.5, seed=1)
    priority, client = draw.randint(-2, 2), draw.choice("abc")
    ttft, tpot = draw.choice([None, 1.0, 1e3, 1e6]), draw.choice([None, 1.0, 30.0, 1e6])
    return [
        Request(
            request_id=f"{number}-{sample}",
            prompt_token_ids=prompt,
            params=params,
            sample_index=sample,
            priority=priority,
            arrival=now,
            ttft_ms=ttft,
            tpot_ms=tpot,
            client=client,
        )
        for sample in range(draw.choice([1, 1, 1, 2, 8]))
    ]


@pytest.mark.parametrize("queues", COUNTS)
def test_an_engine_reports_about_any_queue(queues: int) -> None:
    """Loads, predictions, traces and explanations, before, during and after a few steps."""
    most: Counter[str] = Counter()
    for seed in range(queues):
        with pytest.MonkeyPatch.context() as patch:
            draw = random.Random(seed)
            virtual = draw_engine(draw, patch)
            engine, longest = virtual.engine, draw.choice([1, 3, 50, 600])
            for number in range(draw.choice([1, 10, 40])):
                requests = draw_requests(draw, number, virtual.clock.now, longest)
                if longest + 600 <= 2048 and len(requests) <= engine.scheduler.registry.max_num_seqs:
                    engine.add(*requests)
            for _ in range(draw.choice([1, 2, 5])):
                note(most, virtual, draw, seed)
                with counted_iterations() as counts:
                    engine.step()
                    engine.passed_on()
                most["step"] = max(most["step"], bounded(counts.total(), *PLANNED, virtual, seed))
            trace = engine.trace()
            assert str(explain(Trace.from_json(trace.to_json()))), seed
            assert engine.load.report_faults == 0, seed


def note(most: Counter[str], virtual: Virtual, draw: random.Random, seed: int) -> None:
    """Asks for a load, and for a prediction of a few requests and of one that waits."""
    engine, scheduler = virtual.engine, virtual.engine.scheduler
    engine._outlook._until = -math.inf  # otherwise it might reuse its last result
    with counted_iterations() as counts:
        load = engine.load
    assert load.first_token_seconds is not None and 0.0 < load.first_token_seconds < math.inf, seed
    most["load"] = max(most["load"], bounded(counts.total(), ONCE, EACH, virtual, seed))
    asked = [Hypothetical(draw.randint(1, 600), draw.randint(1, 600), draw.choice([1, 8])) for _ in range(3)]
    for waiting in scheduler.registry.snapshot()[1][:1]:
        asked.append(hypothetical(scheduler, waiting.request))
    with counted_iterations() as counts:
        found = expect(scheduler, asked)
    assert all(0.0 < one.first_token <= one.last_token < math.inf for one in found), seed
    most["predict"] = max(most["predict"], bounded(counts.total(), ONCE, EACH, virtual, seed))


def bounded(iterations: int, once: int, each: int, virtual: Virtual, seed: int) -> int:
    scheduler = virtual.engine.scheduler
    assert iterations <= once + each * (scheduler.registry.num_running + scheduler.registry.num_waiting), seed
    return iterations


def test_two_batches_of_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """250 prompts of one token and 600 more to generate, in steps of at most two tiles."""
    virtual = make_virtual(monkeypatch, places=32, pages=2048, budget=32 + 2 * 64)
    for _ in range(250):
        virtual.ask(1, 600)
    draw, most = random.Random(0), Counter[str]()
    for _ in range(40):
        virtual.turn()
        note(most, virtual, draw, 0)
    assert virtual.engine.scheduler.registry.num_running == 32


@pytest.mark.parametrize("on_late", ["serve", "reject"])
def test_judging_many_requests_takes_several_steps(on_late: OnLate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with targets that come at once, half of which cannot be met: each step judges only some of
    them.
    """
    monkeypatch.setattr(acceptance, "EFFORT", 500)
    virtual = make_virtual(
        monkeypatch, tile=16, options=SchedulingOptions(strategy="latency", on_late=on_late)
    )
    for number in range(30):
        params, tpot_ms = SamplingParams(max_tokens=2), 1e6 if number % 2 else 1.0
        request = Request(
            request_id=str(number),
            prompt_token_ids=[number + 1] * 150,
            params=params,
            arrival=1000.0,
            tpot_ms=tpot_ms,
        )
        virtual.engine.add(request)
    while virtual.engine.has_work:
        with counted_iterations() as counts:
            virtual.turn()
        assert counts["promises"] <= 5000
    load = virtual.engine.load
    assert (load.targets_met, load.targets_missed, load.targets_rejected) == (
        (15, 15, 0) if on_late == "serve" else (15, 0, 15)
    )


def test_an_endless_loop_is_counted() -> None:
    """Otherwise these tests would hang, rather than fail, if a forecast did not end."""
    machine = draw_machine(random.Random(0))
    with pytest.raises(TooManyIterations), counted_iterations(10):
        Forecast(
            machine, [], draw_jobs(random.Random(0), 400, 50, decoding=False), [SequenceGroup(0, 5, 5, 1, 0)]
        ).run()
