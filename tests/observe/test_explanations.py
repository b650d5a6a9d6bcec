"""Each rule reports its problem when that is provoked, and only then."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jengine.insight.explanations.explain import RULES, explain
from jengine.insight.explanations.finding import Finding, Window
from jengine.insight.recording import step_recorder
from jengine.insight.recording.records import Memory
from jengine.insight.recording.trace import Readers, Trace
from jengine.scheduling.costs.draft_costs import all_of_them
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.table.program_table import TrunkKey
from tests.observe.virtual import MS, TILE, Kernel, Load, Virtual, make_virtual
from tests.scheduling.adversaries import Knowing


@pytest.fixture(autouse=True)
def steady_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recorder, "memory", lambda now: Memory(now, 1 << 30, 1 << 33))


def busy(virtual: Virtual, requests: int = 8, output: int = 200) -> Virtual:
    """A run with as many requests as can run at once, all of them from the start."""
    for _ in range(requests):
        virtual.ask(TILE, output)
    return virtual


@pytest.fixture(scope="module")
def healthy() -> Iterator[Trace]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield busy(make_virtual(monkeypatch)).run()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_silent_when_healthy(rule: Callable[[Window], Finding | None], healthy: Trace) -> None:
    assert len(healthy.steps) == 200 and rule(Window(healthy)) is None


def test_a_healthy_engine_is_bound_by_its_device(healthy: Trace) -> None:
    explanation = explain(healthy)
    assert explanation.bound == "device" and not explanation.findings
    assert "Bound by device" in str(explanation) and "device" in explanation._repr_html_()
    assert explanation.shares["wait"] > 0.8


def test_without_steps() -> None:
    from jengine.insight.recording.records import EngineFacts

    explanation = explain(Trace.empty(EngineFacts(8, 512, 512, 16, 100)))
    assert explanation.bound == "idle" and str(explanation) == "No steps were recorded."


def found(virtual: Virtual, name: str) -> Finding:
    """The only finding."""
    explanation = explain(virtual.run())
    assert [finding.name for finding in explanation.findings] == [name], explanation
    finding = explanation.findings[0]
    assert explanation.bound == name and 0.0 < finding.share <= 1.0
    assert (
        finding.evidence
        and finding.option in str(finding)
        and finding.effect in explanation._repr_html_().replace("&#x27;", "'")
    )
    return finding


def test_host(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found(busy(make_virtual(monkeypatch, load=Load(schedule=25 * MS))), "host")
    assert "schedule" in finding.summary and finding.option == "max_num_seqs"
    assert finding.evidence["host, a step"] == "25.5 ms"


def test_host_that_makes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "detokenize" in found(busy(make_virtual(monkeypatch, load=Load(text=25 * MS))), "host").option


def test_host_without_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found(busy(make_virtual(monkeypatch, load=Load(schedule=8 * MS), overlap=False)), "host")
    assert finding.option == "overlap" and finding.effect == "1.8 times the tokens a second"


def test_prefill_interference(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = make_virtual(monkeypatch, token=0.2 * MS)
    for _ in range(4):
        virtual.ask(TILE, 300)
    for i in range(1, 80):
        virtual.ask(4 * TILE, 2, at=0.08 * i)
    finding = found(virtual, "prefill_interference")
    assert finding.option == "max_num_batched_tokens" and finding.change.startswith(f"{8 + 2 * TILE} ")
    assert finding.effect == "the longest wait between tokens falls from 62.9 ms to 37.3 ms"


def test_page_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found(busy(make_virtual(monkeypatch, pages=60), output=256), "page_pressure")
    assert "preemptions" in finding.summary and finding.option == "num_pages"
    assert int(finding.evidence["tokens computed again"]) > 100


def test_batches_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found(busy(make_virtual(monkeypatch), requests=60, output=50), "batches_too_small")
    assert (finding.option, finding.effect) == ("max_num_seqs", "2.0 times the tokens a second")


def test_requests_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = make_virtual(monkeypatch, places=32)
    for i in range(10):
        virtual.ask(TILE, 20, at=0.22 * i)
    finding = found(virtual, "batches_too_small")
    assert (
        finding.option == "requests at once"
        and finding.effect == "7.0 times the tokens a second with 8 at once"
    )


def test_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found(busy(make_virtual(monkeypatch, places=32, token=1 * MS), requests=20), "padding")
    assert finding.option == "max_num_seqs" and finding.change.startswith("24:")


def test_padded_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that would not fit on the rows."""
    virtual = make_virtual(monkeypatch, base=5 * MS, token=0.5 * MS)
    for i in range(300):
        virtual.ask(17, 1, at=0.05 * i)
    finding = found(virtual, "padding")
    assert finding.option == "tile_size" and finding.change.startswith("32:")


def test_rows_that_compute_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is padded but a few rows."""
    virtual = make_virtual(monkeypatch, base=5 * MS, token=0.5 * MS)
    for i in range(300):
        virtual.ask(6, 1, at=0.05 * i)
    trace = virtual.run()
    assert not explain(trace).findings
    assert all(step.rows == step.prompt_rows == 6 and not step.trunk.tiles for step in trace.steps)


@pytest.mark.parametrize("right", [0.0, 0.3, 1.0])
def test_wrong_drafts(right: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that have rows are verified, whatever that costs."""
    drafter = Knowing(lambda sequence: [7] * 600, right, most=3)
    virtual = make_virtual(
        monkeypatch, token=1 * MS, drafters=[drafter], how_many_drafts=all_of_them, places=32
    )
    trace = busy(virtual, requests=8, output=300).run()
    steps = [step for step in trace.steps if step.drafts]
    assert max(step.drafts for step in steps) == 24 and steps[0].rows == 8 + steps[0].drafts
    assert sum(step.generated for step in trace.steps) == 8 * 299
    if right == 1.0:
        assert not explain(trace).findings
        return
    finding = explain(trace).findings[0]
    assert (finding.name, finding.option) == ("wrong_drafts", "speculative_config")
    wrong = 1 - sum(step.accepted for step in steps) / sum(step.drafts for step in steps)
    assert finding.summary.startswith(f"{wrong:.0%} of the drafts are wrong")
    assert finding.evidence["without its drafts"] in ("18.1 ms", "17.9 ms")  # at the end there are fewer rows


def test_more_places_of_adapters_than_are_used(healthy: Trace) -> None:
    """Each step computes eight places, and takes three fifths longer than without."""
    costs = healthy.step_costs
    table = dataclasses.replace(costs.table, adapters=8)
    known = {key: cost.seconds for key, cost in costs.known.items()}
    known |= {replace_adapted(key): 1.6 * value for key, value in known.items() if isinstance(key, TrunkKey)}
    steps = [msgspec.structs.replace(step, trunk=replace_adapted(step.trunk)) for step in healthy.steps]
    requests = [
        msgspec.structs.replace(one, lora=name)
        for one, name in zip(healthy.requests, ["a", "b", "c"] * 9, strict=False)
    ]
    more = StepCosts(table, known, slopes=costs.slopes)
    trace = msgspec.structs.replace(
        healthy, steps=steps, requests=requests, costs=msgspec.Raw(more.to_json())
    )
    [finding] = explain(trace).findings
    assert (finding.name, finding.option) == ("places_of_adapters", "max_loras")
    assert finding.change.startswith("3: ") and finding.evidence["adapters in use, and places"] == "3 and 8"


def replace_adapted(key: TrunkKey) -> TrunkKey:
    return dataclasses.replace(key, adapted=8)


def test_drafts_by_cost_are_never_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    for right in (0.0, 0.5, 0.9):
        drafter = Knowing(lambda sequence: [7] * 600, right, most=3)
        virtual = make_virtual(monkeypatch, token=1 * MS, drafters=[drafter], places=32)
        trace = busy(virtual, requests=8, output=300).run()
        assert "wrong_drafts" not in [finding.name for finding in explain(trace).findings]
        gain = virtual.engine.scheduler.speculation.gain
        assert (gain > 1.2) == (right == 0.9) and gain > 0.999


def test_queueing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take as long as they have tokens: larger batches would not help."""
    virtual = make_virtual(monkeypatch, base=0.0, token=1 * MS)
    for i in range(30):
        virtual.ask(TILE, 150, at=0.01 * i)
    finding = found(virtual, "queueing")
    assert finding.option == "replicas" and "engines keep up with" in finding.effect


def test_slow_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        found(busy(make_virtual(monkeypatch, load=Load(away=6 * MS))), "slow_readers").option
        == "how outputs are read"
    )


def test_a_server_has_no_callers_in_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = busy(make_virtual(monkeypatch, load=Load(away=25 * MS))).run()
    assert [finding.name for finding in explain(trace).findings] == ["slow_readers"]
    trace.readers = Readers()
    [finding] = explain(trace).findings
    assert finding.name == "host" and "away" in finding.summary


def test_slow_readers_of_a_server(healthy: Trace) -> None:
    trace = Trace.from_json(healthy.to_json())
    trace.readers = Readers(streams=8, waiting=0)
    assert explain(trace).bound == "device"
    trace.readers = Readers(streams=8, waiting=2, longest=3.5)
    [finding] = explain(trace).findings
    assert (
        finding.name == "slow_readers"
        and finding.evidence == {"the longest wait": "3.5 s"}
        and finding.option == "write_timeout"
    )


def test_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = make_virtual(monkeypatch)

    class Slow:
        def fill(self, words: np.ndarray) -> None:
            virtual.clock.now += 3 * MS

        def accept(self, token: int) -> None:
            pass

        def rollback(self, count: int) -> None:
            pass

        def forced(self) -> list[int]:
            return []

        def free(self) -> int:
            return 0

    for _ in range(8):
        virtual.ask(TILE, 100, mask=Slow())
    finding = found(virtual, "masks")
    assert (
        finding.option == "structured_outputs" and finding.evidence["masks, a step that has some"] == "24 ms"
    )


def test_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual, steps = busy(make_virtual(monkeypatch)), itertools.count()

    def each_step() -> None:
        if next(steps) == 50:
            jax.jit(lambda x: x * 3 + 41)(jnp.zeros(7)).block_until_ready()

    virtual.each_step = each_step
    assert int(found(virtual, "compilation").evidence["compilations"]) >= 1


def test_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection of the real collector, which takes 60 ms of the virtual clock."""
    virtual, steps = busy(make_virtual(monkeypatch)), itertools.count()

    def pause(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            virtual.clock.now += 60 * MS

    def each_step() -> None:
        if next(steps) % 20 == 10:
            gc.callbacks.append(pause)  # behind the engine's own
            try:
                gc.collect()
            finally:
                gc.callbacks.remove(pause)

    virtual.each_step = each_step
    gc.freeze()  # what other tests keep would make each take long; unfrozen, also those of later tests
    finding = found(virtual, "garbage_collection")
    assert finding.evidence["the longest"] == "60 ms" and "gc.freeze" in finding.option


def test_memory_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        step_recorder, "memory", lambda now: Memory(now, (1 << 30) + int((now - 1000) * (5 << 20)), 3 << 30)
    )
    finding = found(busy(make_virtual(monkeypatch), output=1900), "memory_growth")
    assert "300 MiB" in finding.summary and finding.effect == "memory lasts for 10 minutes more"


def test_a_machine_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found(busy(make_virtual(monkeypatch, load=Load(slower=1.6))), "busy_machine")
    # some of it moves the costs
    assert 1.4 < float(finding.evidence["steps, against their costs"].split()[0]) <= 1.6


def test_a_loop_without_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found(
        busy(make_virtual(monkeypatch, load=Load(schedule=20 * MS, processor=0.3))), "busy_machine"
    )
    assert finding.evidence["processor time of the loop"] == "30%"


def on(virtual: Virtual, kernel: Kernel, output: int = 400) -> Virtual:
    virtual.engine.records._machine = kernel  # type: ignore[assignment]
    return busy(virtual, output=output)


def test_a_machine_that_was_always_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its costs were measured under the same load, so no step is late."""
    rates = {"ran": 0.5, "queued": 1.5, "loop_ran": 0.1, "loop_queued": 0.3, "normal": 1.9, "pressure": 0.99}
    virtual = on(make_virtual(monkeypatch), Kernel({**rates, "switches": 400.0}))
    finding = found(virtual, "busy_machine")
    assert "75% of the time that they could run; other processes use 1.4 of 2" in finding.summary
    assert finding.evidence["some process waits for a processor (pressure)"] == "99%"
    assert finding.evidence["involuntary switches"] == "400 a second"
    assert finding.share == pytest.approx(0.75) and finding.effect == "4.0 times the tokens a second"


@pytest.mark.parametrize(
    ("rates", "summary"),
    [
        ({"throttled": 0.4, "normal": 1.0}, "the container's quota of processors is used up 40% of the time"),
        ({"stolen": 0.5, "normal": 1.0}, "the hypervisor takes 0.5 of 2 processors"),
    ],
)
def test_processors_that_are_taken_away(
    rates: dict[str, float], summary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        found(on(make_virtual(monkeypatch), Kernel({"ran": 1.0, **rates})), "busy_machine").summary == summary
    )


def test_threads_that_wait_little_are_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"ran": 1.5, "queued": 0.3, "loop_ran": 0.2, "loop_queued": 0.02, "normal": 1.6}
    assert explain(on(make_virtual(monkeypatch), Kernel(rates)).run()).findings == ()
    idle = {"ran": 0.01, "queued": 0.03, "normal": 1.9}
    assert explain(on(make_virtual(monkeypatch), Kernel(idle)).run()).findings == ()


def test_programs_that_are_still_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is blamed for what they do: threads that wait, steps that are late, garbage, memory."""
    monkeypatch.setattr(
        step_recorder, "memory", lambda now: Memory(now, (1 << 30) + int((now - 1000) * (5 << 20)), 3 << 30)
    )
    rates = {"ran": 0.6, "queued": 0.4, "loop_ran": 0.3, "loop_queued": 0.2, "normal": 0.7, "low": 1.3}
    kernel = Kernel(rates, programs=50, compiled=30.0)
    virtual = on(make_virtual(monkeypatch, load=Load(slower=1.6)), kernel, 1900)
    while virtual.clock.now < 1020.0:
        virtual.turn()
    [finding] = explain(virtual.engine.trace()).findings
    assert finding.name == "compiling" and finding.share == pytest.approx(0.4)
    assert re.match(r"3[23] of 50 programs are ready", finding.summary)
    assert re.match(r"1[78] programs, ready in about (10|11) s", finding.evidence["left"])
    assert finding.evidence["work of low priority, such as compilers, uses"] == "1.3 of 2 processors"


def test_compilers_beside_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"ran": 0.2, "queued": 0.8, "loop_ran": 0.1, "loop_queued": 0.4, "normal": 1.8, "low": 0.2}
    virtual = on(make_virtual(monkeypatch), Kernel(rates, programs=50, compiled=1000.0))
    others, compilers = explain(virtual.run()).findings
    assert (others.name, compilers.name) == ("busy_machine", "compiling")
    assert others.share == pytest.approx(0.8) and compilers.share == pytest.approx(0.8 * 0.2 / 1.8)


def test_compilers_that_keep_only_each_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"ran": 0.2, "queued": 0.8, "loop_ran": 0.1, "normal": 1.8, "low": 0.2}
    virtual = on(make_virtual(monkeypatch), Kernel(rates, programs=50, compiled=1000.0))
    assert [finding.name for finding in explain(virtual.run()).findings] == ["compiling"]


def test_memory_that_compilers_took_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """It grew until the programs were ready, and no more."""
    monkeypatch.setattr(
        step_recorder,
        "memory",
        lambda now: Memory(now, (1 << 30) + int(min(now - 1000, 15) * (9 << 20)), 3 << 30),
    )
    kernel = Kernel({"ran": 1.0, "normal": 1.0}, programs=50, compiled=14.5)
    assert explain(on(make_virtual(monkeypatch), kernel, 1900).run()).findings == ()
    kernel = Kernel({**kernel.rates, "queued": 0.2}, programs=50, compiled=14.5)
    [finding] = explain(on(make_virtual(monkeypatch), kernel, 1900).run()).findings
    assert finding.name == "compiling" and "now all 50 programs are ready" in finding.summary


def test_each_trunk_is_known(healthy: Trace) -> None:
    """The engine's own costs predict effects, and are part of a trace."""
    costs = Trace.from_json(healthy.to_json()).step_costs
    assert costs.base(TrunkKey(8, 0)) == pytest.approx(10.16 * MS, rel=0.05)
