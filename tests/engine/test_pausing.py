"""Engines that are paused, and that give memory back while they sleep."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jengine import LLM, AsyncLLM, InvalidArgument, SamplingParams
from jengine.base.compiles import compile_count
from jengine.engine.operations import GetPauseState, Pause
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL

OPTIONS: dict[str, Any] = {**SMALL, "max_model_len": 192, "num_pages": 200, "weight_updates": True}
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
WAIT = 60.0  # seconds after which a thread hangs


@pytest.fixture(scope="module")
def llm(text_model: Path) -> Iterator[LLM]:
    with on_demand(), LLM(text_model, progress=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def awake(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        llm: LLM = request.getfixturevalue("llm")
        assert not llm.is_paused() and not llm.is_sleeping()
        llm.engine.scheduler.check_integrity()
        assert llm.engine.scheduler.blocks.owned == 0 and not llm.engine.gate.held


def answer(llm: LLM, prompt: str, params: SamplingParams) -> Any:
    [output] = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0]


class Running:
    """A request that another thread waits for, and that has begun."""

    def __init__(self, llm: LLM, prompt: str = "dog") -> None:
        self.pool = ThreadPoolExecutor(1)
        self.answer = self.pool.submit(answer, llm, prompt, LONG)
        by_id = llm.engine.scheduler.registry.by_id
        until(lambda: any(len(s.tokens) > s.prompt_len + 2 for s in [*by_id.values()]))


def until(done: Any) -> None:
    end = time.monotonic() + WAIT
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_keep_goes_on_where_it_was(llm: LLM) -> None:
    expected = answer(llm, "dog", LONG).token_ids
    running, preempted = Running(llm), llm.stats["preemptions"]
    llm.pause("keep")
    assert llm.is_paused()
    [sequence] = llm.engine.scheduler.registry.by_id.values()
    length = len(sequence.tokens)
    other = ThreadPoolExecutor(1).submit(answer, llm, "cat", SHORT)
    until(lambda: llm.engine.gate.held == 1 and llm.engine.load.waiting == 1)
    time.sleep(0.05)
    assert len(sequence.tokens) == length and not other.done() and not running.answer.done()
    llm.resume()
    assert running.answer.result(WAIT).token_ids == expected and llm.stats["preemptions"] == preempted
    assert len(other.result(WAIT).token_ids) == 6


def test_wait_lets_requests_finish(llm: LLM) -> None:
    running = Running(llm)
    llm.pause("wait")
    until(running.answer.done)
    assert running.answer.result().finish_reason == "length"
    other = ThreadPoolExecutor(1).submit(answer, llm, "cat", SHORT)
    until(lambda: llm.engine.gate.held == 1)
    llm.resume()
    assert len(other.result(WAIT).token_ids) == 6


def test_wait_finishes_a_stream_that_no_one_reads(llm: LLM) -> None:
    stream = llm.stream("dog", LONG)
    next(stream)
    llm.pause("wait")
    llm.resume()
    *_, last = stream
    assert len(last.outputs[0].token_ids) == 100


def test_abort_ends_requests(llm: LLM) -> None:
    running = Running(llm)
    llm.pause()
    ended = running.answer.result(WAIT)
    assert (ended.finish_reason, ended.stop_reason) == ("abort", "paused") and 2 < len(ended.token_ids) < 100
    llm.resume()


def test_a_request_at_the_gate_may_be_given_up(llm: LLM) -> None:
    llm.pause()
    stream = llm.stream("dog", SamplingParams(n=3, temperature=1.0))
    thread = threading.Thread(target=lambda: next(stream))  # one that waits in vain, for now
    thread.start()
    until(lambda: llm.engine.gate.held == 3)
    llm.engine.end(next(iter(llm.engine.gate._held)), "abort")
    assert llm.engine.gate.held == 2
    llm.resume()
    thread.join(WAIT)
    stream.close()


def held() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back(llm: LLM, level: int) -> None:
    expected = answer(llm, "dog", LONG).token_ids
    before, parts, counted = held(), llm.engine.memory_parts(), compile_count()
    running = Running(llm)
    llm.sleep(level, "keep")
    assert llm.is_sleeping() and llm.is_paused()
    # on a CPU, weights that were moved to the host's memory stay where they are
    assert before - held() > 0.95 * (parts["cache"] + (parts["weights"] if level == 2 else 0))
    other = ThreadPoolExecutor(1).submit(answer, llm, "dog", SHORT)
    until(lambda: llm.engine.gate.held == 1)
    with pytest.raises(InvalidArgument, match=r"asleep=.*kv_cache.*: the engine sleeps: call wake_up first"):
        llm.resume()
    llm.wake_up(["kv_cache"])
    assert llm.is_sleeping() and llm.is_paused()
    llm.wake_up()
    assert not llm.is_sleeping() and llm.is_paused() is (level == 2)
    if level == 2:
        with pytest.raises(InvalidArgument, match="weights=None: the engine has none: call update_weights"):
            llm.resume()
        assert not other.done()
        llm.update_weights(weights_of(llm))
    assert running.answer.result(WAIT).token_ids == expected
    assert other.result(WAIT).token_ids == expected[:6]
    after = llm.engine.memory_parts()
    assert all(after[name] == parts[name] for name in ("weights", "cache")) and compile_count() == counted
    assert abs(held() - before) < parts["weights"] / 10  # the last step's samples


def weights_of(llm: LLM) -> Any:
    """The weights of the folder that it was started with, as a tree."""
    from jengine.checkpoints import load

    spec = llm.engine.runner.worker.spec  # type: ignore[attr-defined]
    tree = load(Path(llm.model), spec.model, spec.mesh, progress=False)
    return jax.tree.map(np.asarray, tree)


def test_an_engine_that_was_paused_stays_paused(llm: LLM) -> None:
    llm.pause("wait")
    llm.sleep()
    llm.update_weights(weights_of(llm))  # wakes the weights
    llm.wake_up(["kv_cache"])
    assert llm.is_paused() and not llm.is_sleeping()
    llm.resume()
    llm.sleep(tags=["weights"], mode="wait")
    assert llm.is_sleeping()
    llm.wake_up(["weights"])


def test_an_engine_without_weights_that_sleeps_again_has_none(llm: LLM) -> None:
    llm.sleep(2)
    llm.wake_up()
    llm.sleep(1)
    llm.wake_up()
    with pytest.raises(InvalidArgument, match="weights=None: the engine has none: call update_weights"):
        llm.resume()
    llm.update_weights(weights_of(llm))


def test_an_update_wakes_weights_that_are_not_replaced(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a draft model."""
    moves, move = list[bool](), llm.engine.runner.move_weights
    monkeypatch.setattr(
        llm.engine.runner, "move_weights", lambda **how: moves.append(how["away"]) or move(**how)
    )
    llm.sleep(2)
    llm.update_weights(weights_of(llm))
    llm.wake_up()
    llm.update_weights(weights_of(llm))  # of an engine that is awake
    assert moves == [True, False]


def test_an_engine_that_sleeps_waits_for_no_request(llm: LLM) -> None:
    running = Running(llm)
    llm.sleep(mode="keep")
    llm.engine.do(Pause("wait"))
    assert llm.engine.do(GetPauseState()).idle
    llm.wake_up()
    assert not llm.engine.do(GetPauseState()).idle
    llm.pause("wait")
    assert running.answer.result(WAIT).finish_reason == "length"
    llm.resume()


def test_what_cannot_be_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="mode='never': must be one of abort, wait, keep"):
        llm.pause("never")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="level=3: must be a whole number, at least 1 and at most 2"):
        llm.sleep(3)
    for call in (llm.sleep, llm.wake_up):
        with pytest.raises(InvalidArgument, match="tags='scheduling': must be of weights, kv_cache"):
            call(tags=["scheduling"])  # type: ignore[operator]
    assert not llm.is_paused()


def test_an_async_engine_pauses_and_sleeps(text_model: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(text_model, progress=False, **OPTIONS) as llm:

            async def tokens(params: SamplingParams) -> Any:
                return [output async for output in llm.generate("dog", params)][-1].outputs[0]

            expected = (await tokens(LONG)).token_ids
            for mode, reason in (("keep", "length"), ("wait", "length"), ("abort", "abort")):
                running = asyncio.create_task(tokens(LONG))
                while not llm.load.running:
                    await asyncio.sleep(0.001)
                await llm.sleep(mode=mode)  # type: ignore[arg-type]
                assert await llm.is_sleeping() and await llm.is_paused()
                waiting = asyncio.create_task(tokens(SHORT))
                await llm.pause("keep")
                await llm.wake_up()
                assert not await llm.is_sleeping() and await llm.is_paused() and not waiting.done()
                await llm.resume()
                assert (await waiting).token_ids == expected[:6] and not await llm.is_paused()
                ended = await running
                assert ended.finish_reason == reason
                assert ended.token_ids == expected[: len(ended.token_ids)]

    with on_demand():
        asyncio.run(main())
