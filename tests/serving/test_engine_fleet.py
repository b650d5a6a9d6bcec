"""Replicas in processes: one that is killed is replaced, and loses nothing that it had not begun."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jengine import AsyncLLM, EngineDead, InvalidArgument, SamplingParams, Tokenizer
from jengine.core.config import EngineConfig
from jengine.serving.config import ServerConfig
from jengine.serving.processes import engine_fleet
from jengine.serving.processes.engine_fleet import EngineFleet, Place, maker
from jengine.serving.processes.engine_process import EngineProcess
from jengine.serving.processes.supervisor import OnEnd, Supervisor
from jengine.spi import BackOff, EngineState, SetStrategy
from tests.serving.children import LONG, MOCK, PROMPT, collect
from tests.serving.leaks import alive, nothing_leaks, wait_until


def fleet(count: int, ended: list[EngineDead | None], first: float = 0.05, **options: Any) -> EngineFleet:
    """A fleet of mocks."""
    return EngineFleet(
        lambda index, on_end: EngineProcess(MOCK, options, on_end),
        count,
        on_end=ended.append,
        back_off=partial(BackOff, first=first),
    )


def pids(engine: EngineFleet) -> list[int]:
    return [process.pid or 0 for process in engine.processes]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


def test_a_killed_replica_is_replaced_while_the_other_answers(tokenizer: Tokenizer) -> None:
    ended = list[EngineDead | None]()

    async def main(engine: EngineFleet) -> None:
        async with AsyncLLM.over(engine.backend, tokenizer) as llm:
            running = [asyncio.create_task(collect(llm, [i, i], LONG)) for i in range(4)]
            while llm.load.running < 4:
                await asyncio.sleep(0.01)
            first = pids(engine)[0]
            os.kill(first, signal.SIGKILL)
            ends = [results[-1].outputs[0] for results in await asyncio.gather(*running)]
            lost = [one.stop_reason for one in ends if one.finish_reason == "error"]
            assert len(lost) == 2 and all("its replica has ended" in str(reason) for reason in lost)
            [answer] = (await collect(llm, PROMPT, SamplingParams(max_tokens=5), output_kind="final"))[
                -1
            ].outputs
            assert len(answer.token_ids) == 5
            await asyncio.to_thread(wait_until, lambda: engine.backend.restarts == 1)
            assert pids(engine)[0] not in (0, first) and not ended
            many = await asyncio.gather(
                *[collect(llm, [i, 7], SamplingParams(max_tokens=3)) for i in range(8)]
            )
            assert len(many) == 8

    with nothing_leaks():
        engine = fleet(2, ended, seconds=0.005, max_num_seqs=4)
        engine.start()
        asyncio.run(main(engine))
        engine.quit()
    assert ended == [None]


def test_a_replacement_that_is_refused_is_ended() -> None:
    """Its number of pages depends on the memory that is left, and is a part of its limits."""
    made: list[EngineProcess] = []

    def make(index: int, on_end: OnEnd) -> EngineProcess:
        made.append(EngineProcess(MOCK, {"pages": 7 if len(made) in (2, 3) else 9}, on_end))
        return made[-1]

    with nothing_leaks():
        engine = EngineFleet(make, 2, back_off=partial(BackOff, first=0.01))
        engine.start()
        engine.backend.connect(lambda updates: None, lambda error: None)
        os.kill(pids(engine)[0], signal.SIGKILL)
        wait_until(lambda: engine.backend.restarts == 1)
        assert len(made) == 5 and pids(engine) == [made[4].pid, made[1].pid]
        wait_until(lambda: not any(one.pid is not None and alive(one.pid) for one in made[2:4]))
        engine.quit()


def test_a_replacement_has_the_strategy_of_the_others(tokenizer: Tokenizer) -> None:
    state = EngineState()

    def make(index: int, on_end: OnEnd) -> EngineProcess:
        return EngineProcess(MOCK, {}, on_end, state=state)

    async def main(engine: EngineFleet) -> None:
        async with AsyncLLM.over(engine.backend, tokenizer) as llm:
            await llm.do(SetStrategy("latency"))
            os.kill(pids(engine)[0], signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: engine.backend.restarts == 1)
            await collect(llm, PROMPT, SamplingParams(max_tokens=2))
            await collect(llm, [1, 2], SamplingParams(max_tokens=2))
            loads = [process.load.strategy for process in engine.processes]
            assert loads == ["latency", "latency"]

    with nothing_leaks():
        engine = EngineFleet(make, 2, back_off=partial(BackOff, first=0.01))
        engine.start()
        asyncio.run(main(engine))


def test_when_all_have_ended_the_whole_has(tokenizer: Tokenizer) -> None:
    ended = list[EngineDead | None]()

    async def main(engine: EngineFleet) -> None:
        llm = AsyncLLM.over(engine.backend, tokenizer)
        running = [asyncio.create_task(collect(llm, [i, i], LONG)) for i in range(2)]
        while llm.load.running < 2:
            await asyncio.sleep(0.01)
        for pid in pids(engine):
            os.kill(pid, signal.SIGKILL)
        results = await asyncio.gather(*running, return_exceptions=True)
        ends = [
            one if isinstance(one, BaseException) else one[-1].outputs[0].finish_reason for one in results
        ]
        assert all(end == "error" or isinstance(end, EngineDead) for end in ends)
        assert any(isinstance(end, EngineDead) for end in ends), "of the last one"
        await asyncio.to_thread(wait_until, lambda: len(ended) == 1)
        assert isinstance(ended[0], EngineDead)
        await llm.close()

    with nothing_leaks():
        engine = fleet(2, ended, first=60.0, seconds=0.005)
        engine.start()
        asyncio.run(main(engine))
        engine.quit()
    assert len(ended) == 1


def test_a_server_starts_all_again_when_all_have_ended(tokenizer_folder: Path) -> None:
    engines: list[EngineFleet] = []

    def make(on_end: OnEnd) -> EngineFleet:
        options = {"tokenizer_folder": str(tokenizer_folder)}
        patient = partial(BackOff, first=60.0)
        engines.append(
            EngineFleet(
                lambda i, ended: EngineProcess(MOCK, options, ended), 2, on_end=on_end, back_off=patient
            )
        )
        return engines[-1]

    async def main() -> None:
        supervisor = Supervisor("mock", make, back_off=BackOff(first=0.01))
        await supervisor.start()
        assert len(await collect(supervisor.llm, PROMPT, SamplingParams(max_tokens=2)))
        for pid in pids(engines[0]):
            os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: supervisor.restarts == 1)
        assert len(await collect(supervisor.llm, PROMPT, SamplingParams(max_tokens=2)))
        assert len(engines) == 2 and supervisor.load.pages > 0
        await supervisor.close()

    with nothing_leaks():
        asyncio.run(main())


# --- where they run ------------------------------------------------------------------------------


def test_replicas_have_gpus_or_cpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,9")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not any(place.variables for place in engine_fleet.places(2, devices=2)), "GPUs are not used"
    monkeypatch.delenv("JAX_PLATFORMS")
    found = engine_fleet.places(2, devices=2)
    assert [dict(place.variables) for place in found] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    with pytest.raises(InvalidArgument, match=r"size=3: with 2 GPUs for each it needs 6"):
        engine_fleet.places(3, devices=2)
    monkeypatch.setattr(engine_fleet, "_gpus", list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5, 7}, raising=False)
    assert [place.cpus for place in engine_fleet.places(2, devices=1)] == [{0, 1}, {2, 5}]
    assert [place.cpus for place in engine_fleet.places(6, devices=1)] == [frozenset()] * 6, (
        "too few to share"
    )
    assert engine_fleet.places(1, devices=8) == [Place()]


def test_replicas_have_memory_nodes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cpus in enumerate(["0-1,4-5", "2-3,6-7"]):  # the second halves are hyperthreads
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(engine_fleet, "NODES", tmp_path)
    monkeypatch.setattr(engine_fleet, "_gpus", list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert [place.cpus for place in engine_fleet.places(2, devices=1)] == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert [place.cpus for place in engine_fleet.places(4, devices=1)] == [{0, 1}, {4, 5}, {2, 3}, {6, 7}]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_process_stays_on_its_cpus() -> None:
    [cpu, *_] = os.sched_getaffinity(0)
    process = EngineProcess(MOCK, {}, place=Place(cpus=frozenset({cpu})))
    try:
        process.start()
        assert process.pid is not None and os.sched_getaffinity(process.pid) == {cpu}
    finally:
        process.quit()


@pytest.mark.parametrize(
    "option",
    [
        {"enable_lora": True},
        {"kv_events_config": {"enable_kv_cache_events": True}},
    ],
)
def test_what_replicas_cannot_have_is_refused(option: dict[str, Any]) -> None:
    [name] = [*option]
    with pytest.raises(InvalidArgument, match=f"data_parallel_size=2: must be 1 with {name}"):
        maker(ServerConfig(), EngineConfig.of("demo", {"data_parallel_size": 2, **option}))
    with pytest.raises(InvalidArgument, match="prefill_engines=1: must be 0 with weight_updates"):
        maker(ServerConfig(prefill_engines=1), EngineConfig.of("demo", {"weight_updates": True}))
    with pytest.raises(InvalidArgument, match="data_parallel_size=0: must be a whole number, at least 1"):
        EngineConfig(data_parallel_size=0)
