"""Operations on an LLM that threads share; see serving/test_engine_operations.py for the others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from jengine import LLM, SamplingParams
from jengine.api.shared_engine import ThreadCall
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import Operation, decode_operation, update_of
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL

WAIT = 60.0  # seconds after which a thread hangs


@pytest.fixture(scope="module")
def llm(text_model: Path) -> Iterator[LLM]:
    with on_demand(), LLM(text_model, progress=False, **SMALL, max_model_len=192) as llm:
        yield llm


class Fails(Operation[None], frozen=True):
    def run(self, engine: Engine) -> None:
        raise ZeroDivisionError("odd")


def test_operations_can_be_sent() -> None:
    for kind in Operation.__subclasses__():
        if not kind.local:
            with contextlib.suppress(msgspec.ValidationError):  # of missing fields; not of their types
                msgspec.json.decode(b"{}", type=kind)
    update = update_of(Path("weights"), "best", keep_cache=True)
    assert decode_operation("LoadWeights", msgspec.json.encode(update)) == update


def test_an_operation_that_fails_fails_alone(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError, match="odd"):
        llm._shared.do(Fails())
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(
            lambda: llm.generate("dog", SamplingParams(max_tokens=150, ignore_eos=True), use_tqdm=False)
        )
        while llm._shared._leader is None and not other.done():
            time.sleep(0.0005)
        for _ in range(10):
            with pytest.raises(ZeroDivisionError, match="odd"):
                llm._shared.do(Fails())
        assert len(other.result(WAIT)[0].outputs[0].token_ids) == 150


def test_an_operation_in_a_thread_waits_for_no_step(llm: LLM) -> None:
    class Name(Operation[str], frozen=True):
        in_thread = True

        def run(self, engine: Engine) -> str:
            return threading.current_thread().name

    with llm._shared._lock:
        llm._shared._stepping = True
    assert llm._shared.do(Name()) == threading.current_thread().name
    llm._shared._stepping = False


def test_an_interrupted_operation_wakes_no_other_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread no longer sleeps: a thread that looks for the next leader must not find it."""

    class Interrupted:
        def acquire(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("jengine.api.shared_engine.ThreadCall", lambda: ThreadCall(gate=Interrupted()))  # type: ignore[arg-type]
    llm._shared._leader, llm._shared._stepping = ThreadCall(), True  # another thread
    with pytest.raises(KeyboardInterrupt):
        llm.reset_prefix_cache()
    llm._shared._leader, llm._shared._stepping = None, False
    assert not llm._shared._asleep and len(llm._shared._orders) == 1
    llm._shared._orders.popleft()()
