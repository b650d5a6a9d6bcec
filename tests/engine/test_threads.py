"""One LLM in several threads: they share batches, and do not affect each other when interrupted, failing or
leaving.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jengine import LLM, AsyncLLM, EngineDead, InvalidArgument, SamplingParams
from jengine.api.backend import EngineThread
from jengine.api.shared_engine import SharedEngine
from jengine.base.process import uninterrupted
from jengine.engine.operations import ResetPrefixCache
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.mocks.mock_engine import MockEngine

THREADS, EACH = 8, 50
WAIT = 60.0  # seconds after which a thread hangs
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "dog"]


@pytest.fixture(scope="module")
def shared(text_model: Path) -> LLM:
    with on_demand():
        return LLM(text_model, progress=False, **SMALL, max_model_len=192)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """Must be idle and intact afterwards."""
    yield shared
    shared.engine.scheduler.check_integrity()
    assert not shared.engine.has_work and shared.engine.scheduler.blocks.owned == 0
    parts = shared._shared
    assert parts._leader is None and not (parts._calls or parts._asleep or parts._orders or parts._live._live)


def prompt(thread: int, i: int) -> str:
    return f"{WORDS[thread]} {WORDS[i % 8]} {i}"


def params(thread: int, i: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": i},
        {"seed": i, "n": 2},
        {"temperature": 0.0, "stop": "e"},
    ]
    return SamplingParams(max_tokens=3 + (i + thread) % 6, **kinds[i % 4])


def answers(outputs: list[Any]) -> list[tuple[list[int], str, str | None]]:
    return [(c.token_ids, c.text, c.finish_reason) for output in outputs for c in output.outputs]


def ask(llm: LLM, thread: int, i: int) -> list[tuple[list[int], str, str | None]]:
    """One request by itself, as a stream or by generate."""
    if i % 5 == 4:
        *_, last = llm.stream(prompt(thread, i), params(thread, i))
        return answers([last])
    return answers(llm.generate(prompt(thread, i), params(thread, i), use_tqdm=False))


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [future.result(WAIT) for future in [pool.submit(work, i) for i in range(count)]]


def test_all_answers_are_those_of_one_thread(llm: LLM) -> None:
    work = [(prompt(thread, i), params(thread, i)) for thread in range(THREADS) for i in range(EACH)]
    outputs = llm.generate([one for one, _ in work], [one for _, one in work], use_tqdm=False)
    expected = [answers(outputs[thread * EACH : (thread + 1) * EACH]) for thread in range(THREADS)]
    steps = llm.engine.records.steps[-1].number
    got = in_threads(THREADS, lambda thread: [one for i in range(EACH) for one in ask(llm, thread, i)])
    assert got == expected
    alone = sum(one.max_tokens or 0 for _, one in work)  # steps, were each request answered by itself
    assert llm.engine.records.steps[-1].number - steps < alone / 2, "the threads took turns"


def test_a_thread_that_waits_sleeps(llm: LLM) -> None:
    """While another thread steps."""
    steps, turns = llm._shared._step, []

    def work(thread: int) -> None:
        llm.generate(
            [WORDS[thread]] * 8,
            SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True),
            use_tqdm=False,
        )

    def count() -> None:
        turns.append(threading.get_ident())
        steps()

    llm._shared._step = count  # type: ignore[method-assign]
    try:
        in_threads(2, work)
    finally:
        del llm._shared._step  # type: ignore[method-assign]
    changes = sum(a != b for a, b in itertools.pairwise(turns))
    assert changes < len(turns) / 10, "threads take turns at each step"


def test_an_engine_is_closed_between_steps() -> None:
    entered, leave, events = threading.Event(), threading.Event(), list[str]()

    class Engine(MockEngine):
        def step(self) -> list[Any]:
            events.append("step")
            entered.set()
            assert leave.wait(WAIT)
            events.append("stepped")
            return []

        def close(self) -> None:
            events.append("closed")

    shared: Any = SharedEngine(Engine(), None)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as pool:
        stepping = pool.submit(shared.step_until, lambda: False)
        assert entered.wait(WAIT)
        closing = pool.submit(shared.quit)
        while shared._engine is not None:
            time.sleep(0.001)
        leave.set()
        closing.result(WAIT)
        with pytest.raises(EngineDead):
            stepping.result(WAIT)
    assert events == ["step", "stepped", "closed"]


def test_threads_that_leave_or_fail_do_not_disturb_others(llm: LLM) -> None:
    def work(thread: int) -> Any:
        if thread % 4 == 0:  # leaves its streams half-way
            for _ in range(5):
                for output in llm.stream(WORDS[thread], SamplingParams(temperature=0.0, max_tokens=100)):
                    if len(output.outputs[0].token_ids) > 3:
                        break
            return None
        if thread % 4 == 1:  # its bodies and its requests fail
            for _ in range(5):
                with pytest.raises(ZeroDivisionError):
                    for _ in llm.stream(WORDS[thread], SamplingParams(temperature=0.0, max_tokens=100)):
                        raise ZeroDivisionError
                with pytest.raises(InvalidArgument):
                    llm.generate([WORDS[thread], []], use_tqdm=False)
            return None
        return [ask(llm, thread, i) for i in range(10)]

    expected = [work(thread) for thread in range(THREADS)]
    assert in_threads(THREADS, work) == expected


def test_streams_that_are_collected_as_garbage(llm: LLM) -> None:
    """At any point, even in the middle of this thread's changes."""
    for change in range(3):
        stream = llm.stream("the", SamplingParams(temperature=0.0, max_tokens=100))
        next(stream)
        with llm._shared._change():
            if change != 1:
                del stream
        if change == 1:
            del stream
        gc.collect()
        assert (
            len(
                llm.generate("fox", SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)[0]
                .outputs[0]
                .token_ids
            )
            == 4
        )


# Interrupts.


@pytest.mark.parametrize("at", ["dispatch", "read"])
def test_an_interrupt_in_a_step(at: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes effect after the step: this call is aborted, another thread's continues, and the engine is
    intact.
    """
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    expected = answers(llm.generate("dog", greedy, use_tqdm=False))
    runner: Any = llm.engine.runner
    original, main, calls = getattr(runner, at), threading.main_thread(), []

    def interrupt(*arguments: Any) -> Any:
        if threading.current_thread() is main:
            calls.append(at)
            if len(calls) == 3:
                signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(runner, at, interrupt)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            calls.clear()
            other = pool.submit(lambda: answers(llm.generate("dog", greedy, use_tqdm=False)))
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["the", "fox"], greedy.clone(max_tokens=150), use_tqdm=False)
            assert other.result(WAIT) == expected
    monkeypatch.undo()
    assert answers(llm.generate("dog", greedy, use_tqdm=False)) == expected


def test_an_interrupt_while_another_thread_steps(llm: LLM) -> None:
    """The main thread is sleeping."""
    greedy = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    parts, main = llm._shared, threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until = time.monotonic() + WAIT
        while not parts._asleep and time.monotonic() < until:
            time.sleep(0.0005)
        signal.pthread_kill(main, signal.SIGINT)

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(lambda: llm.generate(["dog"] * 16, greedy, use_tqdm=False))
        while parts._leader is None and not other.done():
            time.sleep(0.0005)
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            while True:
                llm.generate("the", greedy, use_tqdm=False)
        assert all(output.finished for output in other.result(WAIT))


def test_uninterrupted() -> None:
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted(), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("the block")
    assert done == ["the block"] and signal.getsignal(signal.SIGINT) is before
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is before


# The prefix cache.


def test_a_reset_comes_between_two_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while another thread steps. Running calls continue."""
    engine, stepping, calls = llm.engine, [False], []
    reset = ResetPrefixCache()
    step: Any = engine.step

    def watched() -> Any:
        stepping[0] = True
        time.sleep(0.001)
        updates = step()
        stepping[0] = False
        return updates

    def do(operation: Any) -> bool:
        calls.append(stepping[0])
        return operation == reset and len(calls) % 2 == 1

    monkeypatch.setattr(engine, "step", watched)
    monkeypatch.setattr(engine, "do", do)
    assert [llm.reset_prefix_cache(), llm.reset_prefix_cache()] == [True, False]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(
            lambda: llm.generate("dog", SamplingParams(max_tokens=150, ignore_eos=True), use_tqdm=False)
        )
        while llm._shared._leader is None and not other.done():
            time.sleep(0.0005)
        got = [llm.reset_prefix_cache() for _ in range(10)]
        assert got == [True, False] * 5 and len(other.result(WAIT)[0].outputs[0].token_ids) == 150
    assert calls == [False] * 12


# Ends.


def small(text_model: Path, **options: Any) -> LLM:
    with on_demand():
        return LLM(text_model, progress=False, **SMALL, max_model_len=192, **options)


def test_a_step_that_fails_ends_every_call(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = small(text_model)
    runner: Any = llm.engine.runner
    original, calls = runner.read, []

    def fail(step: Any) -> Any:
        calls.append(step)
        if len(calls) > 20:
            raise ZeroDivisionError("a fault")
        return original(step)

    monkeypatch.setattr(runner, "read", fail)

    def work(thread: int) -> BaseException | None:
        try:
            llm.generate(WORDS[thread], SamplingParams(max_tokens=150, ignore_eos=True), use_tqdm=False)
        except BaseException as error:
            return error
        return None

    def reset(thread: int) -> BaseException | None:
        try:
            while True:
                llm.reset_prefix_cache()
        except BaseException as error:
            return error

    errors = in_threads(5, lambda thread: (work if thread else reset)(thread))
    assert sum(isinstance(error, ZeroDivisionError) for error in errors) == 1
    assert sum(isinstance(error, EngineDead) and "a fault" in str(error) for error in errors) == 4
    for use in (lambda: llm.stream("the"), llm.reset_prefix_cache):
        with pytest.raises(EngineDead, match="a fault"):
            use()
    llm.close()


def test_closing(text_model: Path) -> None:
    """The engine is freed with its cache and weights; calls in other threads end."""
    with small(text_model) as llm:
        engine, stream = weakref.ref(llm.engine), llm.stream("the")
        next(stream)
        with ThreadPoolExecutor(2) as pool:
            long = SamplingParams(max_tokens=180, ignore_eos=True)
            running = [pool.submit(llm.generate, ["fox"] * 200, long, use_tqdm=False) for _ in range(2)]
            while llm._shared._leader is None:
                time.sleep(0.0005)
            llm.close()
            for one in running:
                assert isinstance(one.exception(WAIT), EngineDead)
    running.clear()
    for use in (
        lambda: llm.generate("the"),
        lambda: llm.stream("the"),
        lambda: next(stream),
        lambda: llm.stats,
        lambda: llm.engine,
        llm.reset_prefix_cache,
    ):
        with pytest.raises(EngineDead, match="has been closed"):
            use()
    assert repr(llm).endswith("closed)") and llm.max_model_len == 192
    llm.close()
    del one
    gc.collect()
    assert engine() is None


def said_by_child(*uses: Callable[[], object]) -> tuple[int, list[str]]:
    """The id of a forked process, and the errors that these functions raise there."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn of forks beside threads
        child = os.fork()
    if child == 0:
        said = []
        for use in uses:
            try:
                use()
                said.append("nothing")
            except BaseException as error:
                said.append(f"{type(error).__name__}: {error}")
        os.write(writer, "\n".join(said).encode())
        os._exit(0)
    os.close(writer)
    until = time.monotonic() + WAIT
    while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < until:
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with open(reader) as pipe:
        said = pipe.read().split("\n")
    assert ended, "it hangs"
    return child, said


def test_a_forked_process_cannot_use_it(llm: LLM) -> None:
    """It raises an error; the threads that it would wait for do not exist after a fork."""
    stream = llm.stream("the", SamplingParams(max_tokens=5))
    next(stream)
    child, said = said_by_child(lambda: llm.generate("the", use_tqdm=False), lambda: next(stream), llm.close)
    stream.close()
    why = (
        f"JengineError: this model was loaded in process {os.getpid()} and cannot be used in process {child},"
        " which was forked from it"
    )
    assert said[0].startswith(why) and said[1].startswith(why)
    assert said[2] == "nothing", "closing is for those that loaded it"


def test_nor_an_async_one(llm: LLM) -> None:
    online = AsyncLLM.over(EngineThread(llm.engine), llm.tokenizer)
    _, said = said_by_child(lambda: asyncio.run(anext(online.generate("the"))))
    asyncio.run(online.close())
    assert said[0].startswith("JengineError: this model was loaded in process ")
