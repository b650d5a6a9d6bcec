"""Costs follow the duration of steps despite disturbances; the number of tiles maximizes useful tokens a
second.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jengine.scheduling.costs.step_costs import FIRST, STEPS, Slopes, StepCosts
from jengine.scheduling.step_plan import Work
from jengine.table.program_table import VARIANTS, ProgramTable, SamplerKey, TrunkKey

TABLE = ProgramTable(row_buckets=(8, 32), mixed_row_buckets=(8, 32), tile_buckets=(1, 2, 4, 8), tile_size=64)
NOISE = 0.03
WORKS = st.builds(Work, st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 10**7))
KEYS = st.sampled_from(TABLE.trunks())


class Machine:
    """A device whose steps take the time given by these costs, times `slow`, plus noise."""

    def __init__(self, seed: int = 0) -> None:
        self.random, self.slow = random.Random(seed), 1.0
        self.trunks = {
            key: 1e-3 + 1.5e-5 * TABLE.tokens(key) + self.random.uniform(0, 1e-3) for key in TABLE.trunks()
        }
        self.samplers = {key: 1e-5 * key.rows * (1 + VARIANTS.index(key.variant)) for key in TABLE.samplers()}
        self.slopes = Slopes(1e-8, 1e-8, 2e-9)

    def usual(self, trunk: TrunkKey, sampler: SamplerKey, work: Work) -> float:
        return self.trunks[trunk] + self.samplers[sampler] + self.slopes.seconds(work)

    def steps(self, count: int):
        """(trunk, sampler, work, seconds) of a mixed load."""
        for _ in range(count):
            trunk = self.random.choice(TABLE.trunks())
            sampler = TABLE.sampler(trunk, self.random.choice(VARIANTS))
            longest = self.random.randrange(1, 4000)
            work = Work(
                longest * self.random.randrange(1, trunk.rows + 1),
                longest,
                trunk.tiles * 64 * self.random.randrange(1, 4000),
            )
            noise = self.random.lognormvariate(0, NOISE)
            yield trunk, sampler, work, self.usual(trunk, sampler, work) * self.slow * noise

    def measured(self) -> StepCosts:
        return StepCosts(TABLE, {**self.trunks, **self.samplers}, slopes=self.slopes)


def run(costs: StepCosts, machine: Machine, count: int) -> list[float]:
    """Runs this many steps. Returns the relative deviation of each from its prediction."""
    errors = []
    for trunk, sampler, work, seconds in machine.steps(count):
        errors.append(abs(seconds / costs.seconds(trunk, sampler, work) - 1.0))
        costs.observe(trunk, sampler, work, seconds)
    return errors


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


# no prediction can be better
SPREAD = median([abs(random.Random(i).lognormvariate(0, NOISE) - 1.0) for i in range(999)])


@given(trunk=KEYS, variant=st.sampled_from(VARIANTS), one=WORKS, more=WORKS)
def test_more_work_never_costs_less(trunk, variant, one, more):
    costs = Machine().measured()
    run(costs, Machine(), 30)
    sampler, both = TABLE.sampler(trunk, variant), Work(*(a + b for a, b in zip(one, more, strict=True)))
    assert 0.0 < costs.seconds(trunk, sampler, one) <= costs.seconds(trunk, sampler, both)


def test_measured_costs_are_exact_until_a_step_differs():
    machine = Machine()
    costs = machine.measured()
    for trunk, sampler, work, _ in machine.steps(50):
        assert costs.seconds(trunk, sampler, work) == pytest.approx(machine.usual(trunk, sampler, work))
        costs.observe(trunk, sampler, work, machine.usual(trunk, sampler, work))
    assert costs.drift == pytest.approx(1.0)


def test_predictions_are_about_as_good_as_noise_allows():
    machine = Machine()
    costs = machine.measured()
    run(costs, machine, 200)
    assert median(run(costs, machine, 500)) < 1.5 * SPREAD


def test_costs_that_were_wrong_are_refined():
    """Each by up to 40 %, some up and some down, and the slopes by half."""
    machine, rng = Machine(), random.Random(1)
    wrong = {key: seconds * rng.uniform(0.6, 1.4) for key, seconds in machine.trunks.items()}
    costs = StepCosts(
        TABLE, {**wrong, **machine.samplers}, slopes=Slopes(*(slope / 2 for slope in machine.slopes))
    )
    before = median(run(costs, machine, 50))
    run(costs, machine, 6000)
    assert median(run(costs, machine, 500)) < min(1.5 * SPREAD, before / 3)


@settings(max_examples=30)
@given(seed=st.integers(0, 99), slow=st.sampled_from([0.5, 1.5, 3.0]), length=st.integers(30, 300))
def test_a_slow_time_passes_without_a_trace(seed, slow, length):
    machine = Machine(seed)
    costs = machine.measured()
    run(costs, machine, 100)
    machine.slow = slow
    run(costs, machine, STEPS)  # it follows
    assert median(run(costs, machine, length)) < 2 * SPREAD
    assert costs.drift == pytest.approx(slow, rel=0.1)
    machine.slow = 1.0
    run(costs, machine, STEPS)  # and is back
    assert median(run(costs, machine, 100)) < 2 * SPREAD
    for trunk, sampler, work, _ in machine.steps(100):
        assert costs.seconds(trunk, sampler, work) / costs.drift == pytest.approx(
            machine.usual(trunk, sampler, work), rel=0.15
        )


@pytest.mark.parametrize("slow, share", [(1.5, 0.3), (1.5, 0.7), (3.0, 0.2), (1.05, 0.5)])
def test_costs_stay_the_same_however_long_some_steps_are_slow(slow, share):
    """Slow steps are further from the median than the others, or these from slow ones."""
    machine, rng = Machine(), random.Random(2)
    costs = machine.measured()
    trunk, sampler, work, _ = next(machine.steps(1))
    usual = machine.usual(trunk, sampler, work)
    for _ in range(10_000):
        costs.observe(trunk, sampler, work, usual * (slow if rng.random() < share else 1.0))
    assert costs.seconds(trunk, sampler, work) / costs.drift == pytest.approx(usual, rel=0.25)
    assert 0.75 < costs.drift < 1.25 * slow


def test_costs_under_usual_load_include_the_mean_of_the_load():
    machine, rng = Machine(), random.Random(3)
    costs = machine.measured()
    trunk, sampler, work, _ = next(machine.steps(1))
    usual = machine.usual(trunk, sampler, work)
    assert costs.under_usual_load().seconds(trunk, sampler, work) == pytest.approx(usual)
    for _ in range(5000):
        costs.observe(trunk, sampler, work, usual * (2.0 if rng.random() < 0.25 else 1.0))
    for _ in range(STEPS):  # what comes last is no more usual than the rest
        costs.observe(trunk, sampler, work, usual * 4.0)
    then = costs.under_usual_load()
    assert then.drift == 1.0 and then.spread == costs.spread
    assert then.seconds(trunk, sampler, work) == pytest.approx(1.25 * usual, rel=0.15)
    assert costs.seconds(trunk, sampler, work) == pytest.approx(4.0 * usual, rel=0.1)


@given(at=st.integers(0, 20), many=st.integers(1, STEPS // 2), factor=st.sampled_from([10.0, 1000.0]))
def test_single_slow_steps_spoil_nothing(at, many, factor):
    machine = Machine()
    costs = machine.measured()
    for i, (trunk, sampler, work, _) in enumerate(machine.steps(60)):
        usual = machine.usual(trunk, sampler, work)
        assert costs.seconds(trunk, sampler, work) == pytest.approx(usual, rel=0.1)
        costs.observe(trunk, sampler, work, usual * (factor if at <= i < at + many else 1.0))


def test_a_program_that_was_not_measured_is_learned_from_few_steps_the_first_of_them_slow():
    machine = Machine()
    trunk, sampler, work = TrunkKey(32, 4), TABLE.sampler(TrunkKey(32, 4), "full"), Work(1000, 100, 5000)
    trunks, samplers = (
        {key: s for key, s in known.items() if key not in (trunk, sampler)}
        for known in (machine.trunks, machine.samplers)
    )
    costs = StepCosts(TABLE, {**trunks, **samplers}, slopes=machine.slopes)
    usual = machine.usual(trunk, sampler, work)
    assert 0.4 * usual < costs.seconds(trunk, sampler, work) < 2.5 * usual, "an estimate from the others"
    costs.observe(trunk, sampler, work, 20 * usual)
    costs.observe(trunk, sampler, work, usual)
    assert costs.seconds(trunk, sampler, work) == pytest.approx(usual)
    for _ in range(FIRST):
        costs.observe(trunk, sampler, work, usual)
    assert costs.seconds(trunk, sampler, work) == pytest.approx(usual) and costs.known[trunk].settled


@settings(max_examples=30)
@given(seed=st.integers(0, 99))
def test_a_new_sampler_takes_no_noise_of_a_large_trunk(seed):
    trunk, sampler, rng = TrunkKey(32, 4), TABLE.sampler(TrunkKey(32, 4), "greedy"), random.Random(seed)
    known = {trunk: 0.200, SamplerKey(sampler.rows, "full"): 0.012}
    costs = StepCosts(TABLE, known, slopes=Slopes(0.0, 0.0, 0.0))
    for _ in range(FIRST):
        costs.observe(trunk, sampler, Work(), rng.uniform(0.8, 1.2) * 0.202)
    assert costs.known[sampler].settled and costs.base(sampler) < 0.010
    assert costs.base(trunk) == 0.200


def test_programs_that_are_new_together_share_a_step_as_their_estimates():
    trunk, sampler = TrunkKey(32, 4), TABLE.sampler(TrunkKey(32, 4), "full")
    costs = StepCosts(TABLE, slopes=Slopes(0.0, 0.0, 0.0))
    ratio = costs.base(trunk) / costs.base(sampler)
    for _ in range(FIRST):
        costs.observe(trunk, sampler, Work(), 0.050)
    assert costs.known[trunk].settled and costs.known[sampler].settled
    assert costs.base(trunk) / costs.base(sampler) == pytest.approx(ratio)
    assert costs.seconds(trunk, sampler) == pytest.approx(0.050)


@given(
    known=st.dictionaries(KEYS, st.floats(1e-4, 1.0), max_size=6),
    trunk=KEYS,
    variant=st.sampled_from(VARIANTS),
)
def test_every_estimate_is_a_time(known, trunk, variant):
    seconds = StepCosts(TABLE, known).seconds(trunk, TABLE.sampler(trunk, variant))
    assert 0.0 < seconds < math.inf


def test_estimates_grow_with_tokens_as_the_known_ones_do():
    costs = StepCosts(TABLE, {TrunkKey(8, 0): 1.0, TrunkKey(8, 1): 2.0})
    tokens = {key: TABLE.tokens(key) for key in TABLE.trunks()}
    for key, count in tokens.items():
        if count > 8:
            assert costs.base(key) == pytest.approx(1.0 + (count - 8) / 64)


@given(seed=st.integers(0, 20), count=st.integers(0, 200))
def test_what_is_saved_is_loaded(seed, count):
    machine = Machine(seed)
    costs = StepCosts(TABLE, slopes=machine.slopes)
    run(costs, machine, count)
    costs.observe_plan(8, 1, 1e-3)
    costs.observe_collect(8, 1, 2e-3)
    again = StepCosts.from_json(costs.to_json())
    assert again.table == TABLE and again.drift == 1.0 and again.spread == costs.spread
    for trunk, sampler, work, _ in machine.steps(50):
        assert again.seconds(trunk, sampler, work) == pytest.approx(
            costs.seconds(trunk, sampler, work) / costs.drift
        )
    assert again.host_seconds(3, 2) == costs.host_seconds(3, 2)
    for broken in b"", b"{}", costs.to_json()[:-2]:
        with pytest.raises(ValueError):
            StepCosts.from_json(broken)


def test_of_another_table_programs_of_the_same_shape_are_known():
    costs = Machine().measured()
    other = costs.for_table(
        ProgramTable(row_buckets=(8, 16), mixed_row_buckets=(8,), tile_buckets=(1, 2), tile_size=128)
    )
    assert other.base(TrunkKey(8, 1)) == costs.base(TrunkKey(8, 2))
    assert other.base(TrunkKey(8, 2)) == costs.base(TrunkKey(8, 4))
    assert costs.base(TrunkKey(8, 0)) < other.base(TrunkKey(16, 0)) < costs.base(TrunkKey(8, 1))


@given(base=st.floats(1e-4, 1e-3), row=st.floats(1e-5, 1e-4))
def test_host_seconds_grow_with_rows_and_forget_pauses(base, row):
    costs, rng = StepCosts(TABLE), random.Random(0)
    for i in range(400):
        rows = rng.randrange(1, 33)
        seconds = base + row * rows
        costs.observe_plan(rows, 0, seconds * (100 if i % 100 == 50 else 1))
    assert costs.host_seconds(16).plan == pytest.approx(base + row * 16, rel=0.2)
    assert costs.host_seconds(32).plan > costs.host_seconds(1).plan
    assert costs.host_seconds(16).collect == StepCosts(TABLE).host_seconds(16).collect
