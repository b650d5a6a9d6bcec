"""Admission order: ageing, fair shares, batches."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jengine.core.request import Request, SamplingParams
from jengine.core.scheduling_options import SchedulingOptions
from jengine.scheduling.requests import policy
from jengine.table.program_table import ProgramTable
from tests.schedulers import make_scheduler
from tests.scheduling.test_promises import Linear
from tests.scheduling.virtual_loop import VirtualLoop

TILE, SEQS, BUDGET = 8, 4, 4 + 4 * 8
TABLE = ProgramTable.build(max_num_seqs=SEQS, max_num_batched_tokens=BUDGET, tile_size=TILE)
STEP = 0.010  # seconds, more or less


class Run:
    """A scheduler on a virtual clock, and the results of its requests."""

    def __init__(self, requests, max_num_seqs=SEQS, **options):
        self.engine = VirtualLoop(Linear(10.0, 0.0, 0.0, 0.0))
        self.scheduler = make_scheduler(
            TABLE,
            page_size=4,
            num_pages=400,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=BUDGET,
            max_model_len=96,
            costs=self.engine.costs,
            clock=self.engine.clock,
            options=SchedulingOptions(**options),
        )
        self.requests = requests

    def finish(self):
        self.engine.run(self.scheduler, self.requests)
        return sorted(self.engine.sequences, key=lambda sequence: (sequence.scheduled, sequence.order))


def request(i, arrival=0.0, *, prompt=8, output=4, **level):
    params = SamplingParams(temperature=0.0, max_tokens=output)
    return Request(
        request_id=str(i),
        prompt_token_ids=[100 + i, *range(1, prompt)],
        params=params,
        arrival=arrival,
        **level,
    )


# --- ageing -------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    ageing=st.sampled_from([0.02, 0.2, 2.0]),
    work=st.lists(st.tuples(st.floats(0.0, 0.05), st.integers(-2, 3)), min_size=2, max_size=40),
)
def test_a_request_is_overtaken_only_by_those_that_arrive_soon_after_it(ageing, work):
    """A request whose priority value is lower by `levels` overtakes it only if it comes within levels *
    ageing seconds. So none starves.
    """
    at, requests = 0.0, []
    for i, (gap, priority) in enumerate(work):
        at += gap
        requests.append(request(i, at, priority=priority))
    begun = Run(requests, max_num_seqs=1, policy="priority", priority_ageing=ageing).finish()
    for place, later in enumerate(begun):
        for earlier in begun[:place]:
            if earlier.arrival > later.arrival:  # it came after, and ran before
                levels = later.request.priority - earlier.request.priority
                assert earlier.arrival - later.arrival <= levels * ageing + 1e-9


def test_without_ageing_priorities_are_strict():
    crowd = [request(i, 0.01 * i, priority=0) for i in range(50)]
    begun = Run(
        [*crowd, request(99, 0.001, priority=1)], max_num_seqs=1, policy="priority", priority_ageing=0.0
    ).finish()
    assert begun[-1].request_id == "99"
    begun = Run(
        [*crowd, request(99, 0.001, priority=1)], max_num_seqs=1, policy="priority", priority_ageing=0.05
    ).finish()
    assert begun.index(next(s for s in begun if s.request_id == "99")) < 10


# --- fair shares --------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    clients=st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=2
    ),
    steps=st.integers(1, 300),
)
def test_clients_that_always_wait_are_served_alike(clients, steps):
    """However long their prompts and outputs are: their shares differ by what can run at once at the most."""
    requests = [
        request(i, prompt=prompt, output=output, client=client)
        for i, (client, (prompt, output)) in enumerate(item for item in clients.items() for _ in range(150))
    ]
    run = Run(requests, policy="fair")
    for one in requests:
        run.engine.add(run.scheduler, one)
    for _ in range(steps):
        run.engine.step(run.scheduler)
    waiting = Counter(sequence.client for sequence in run.scheduler.registry.waiting)
    assume(all(waiting[client] for client in clients))
    served = Counter({client: 0 for client in clients})
    for sequence in run.engine.sequences:
        if sequence.scheduled or sequence.output_token_ids:
            served[sequence.client] += sequence.prompt_len + len(sequence.output_token_ids)
    most = max(prompt + output for prompt, output in clients.values())
    assert max(served.values()) - min(served.values()) <= (SEQS + 1) * most


def test_idle_time_earns_no_credit():
    """b comes when a has been served for long: then they take turns, b does not run alone until it has had as
    much.
    """
    early = [request(i, client="a") for i in range(40)]
    late = [request(100 + i, 0.3, client=client) for i in range(20) for client in ["b"]]
    begun = [s.client for s in Run([*early, *late], max_num_seqs=1, policy="fair").finish()]
    first = begun.index("b")
    assert first < 15 and Counter(begun[first : first + 20]) == {"a": 10, "b": 10}


def test_a_preempted_sequence_is_charged_once():
    run = Run([], policy="fair", max_num_seqs=2)
    sequence = run.engine.add(run.scheduler, request(0, client="a"))
    run.engine.step(run.scheduler)
    run.scheduler.registry.preempt(sequence)
    run.engine.run(run.scheduler, [])
    assert run.scheduler.registry.fair.served == {"a": 8 + 4}


def test_a_snapshot_is_taken_while_another_thread_adds_clients():
    class Changing(dict):
        counts = iter([1])

        def __len__(self):
            return next(self.counts, super().__len__())

    registry = Run([], policy="fair").scheduler.registry
    first, second = SimpleNamespace(order=(0, 1)), SimpleNamespace(order=(0, 2))
    registry.fair._queues = Changing(a=[first], b=[second])
    registry.fair.served = {"a": 0.0, "b": 1.0}
    assert registry.snapshot() == ([], [first, second])


def test_clients_that_come_once_are_forgotten(monkeypatch):
    monkeypatch.setattr(policy, "REMEMBERED", 5)
    run = Run([], policy="fair")
    fair = run.scheduler.registry.fair
    fair.served = {"often": 1e6}
    for number in range(30):
        run.engine.run(run.scheduler, [request(number, client=f"once {number}")])
        assert len(fair.served) <= 7
    assert "often" in fair.served


# --- batches ------------------------------------------------------------------------------------------


def test_dynamic_batches_form_when_full_or_after_a_while():
    run = Run(
        [request(0), request(1, 0.02), request(2, 0.2), *(request(i, 0.3) for i in range(3, 8))],
        batching="dynamic",
        batch_wait_ms=100.0,
    )
    run.finish()
    assert [round(s.scheduled, 3) for s in run.engine.sequences][:3] == [
        0.1,
        0.1,
        pytest.approx(0.3, abs=2 * STEP),
    ]
    assert run.engine.sequences[5].scheduled < 0.3 + 2 * STEP, "four wait: no longer"
    assert run.engine.sequences[7].scheduled >= 0.4, "the fifth of them waits for others"


def test_dynamic_batches_are_of_similar_lengths():
    lengths = [5, 60, 6, 61, 7, 62, 8, 63]
    begun = Run(
        [request(i, prompt=length, output=8) for i, length in enumerate(lengths)], batching="dynamic"
    ).finish()
    assert {s.prompt_len for s in begun[:4]} == {5, 6, 7, 8}


def test_a_static_batch_waits_for_all_of_the_one_before():
    outputs = [2, 20, 3, 4, 5, 6, 7, 8]
    run = Run([request(i, output=output) for i, output in enumerate(outputs)], batching="static")
    run.finish()
    ends = run.engine.ended
    first, second = run.engine.sequences[:4], run.engine.sequences[4:]
    assert min(s.scheduled for s in second) >= max(ends[s] for s in first)
    run = Run([request(i, output=output) for i, output in enumerate(outputs)], batching="dynamic")
    run.finish()
    assert min(s.scheduled for s in run.engine.sequences[4:]) < max(
        run.engine.ended[s] for s in run.engine.sequences[:4]
    )


@pytest.mark.parametrize("batching", ["dynamic", "static"])
def test_requests_that_wait_for_a_batch_can_be_aborted(batching):
    run = Run([], batching=batching)
    run.engine.add(run.scheduler, request(0))
    assert run.scheduler.registry.num_waiting == 1 and run.scheduler.wakes_at == pytest.approx(0.05)
    run.scheduler.abort("0")
    run.scheduler.check_integrity()
    assert not run.scheduler.has_work and run.scheduler.registry.num_waiting == 0
