"""Masks of new requests in the engine's process: compiled once, in turns, and not for requests that have been
ended.
"""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jengine import JengineError, Tokenizer
from jengine.serving.processes.engine_child import Made, MaskQueue, SharedMasks
from jengine.serving.processes.wire import Add, PromptSample, requests_of
from jengine.text import masks


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The regular expressions that have been compiled."""
    seen: list[Any] = []
    compile_structure = masks.compile_structure

    def counting(what: Any, tokenizer: Tokenizer) -> Any:
        seen.append(what.regex)
        return compile_structure(what, tokenizer)

    monkeypatch.setattr(masks, "compile_structure", counting)
    return seen


def order(request_id: str, regex: str, client: str = "a", samples: int = 1, **params: Any) -> Add:
    ids = [PromptSample(request_id if i == 0 else f"{request_id}/{i}", i) for i in range(samples)]
    return Add(
        [1, 2], json.dumps({"structured_outputs": {"regex": regex}, **params}), ids, 0, 0.0, client=client
    )


def allowed(mask: Any) -> set[int]:
    """The tokens that a mask allows."""
    words = np.full(16, 0xFFFFFFFF, np.uint32)
    mask.fill(words)
    return {token for token in range(501) if words[token // 32] >> (token % 32) & 1}


class Queue:
    """A MaskQueue whose thread is the caller's.

    Attributes:
        made: ids of the requests whose masks were made, in order.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.made: list[list[str]] = []
        self.requests: list[Any] = []
        self.queue = MaskQueue(lambda: tokenizer, self._made)

    def _made(self, made: Made) -> None:
        assert isinstance(made, list), made
        self.made.append([request.request_id for request in made])
        self.requests += made

    def run(self) -> None:
        while (following := self.queue._turns.take()) is not None:
            self.queue.make(following[1])


def test_the_prompts_of_a_request_share_a_compilation(tokenizer: Tokenizer, compiled: list[Any]) -> None:
    """Used to be compiled for each of them. Other parameters do not matter; another client shares nothing."""
    queue = Queue(tokenizer)
    for i in range(20):
        queue.queue.put(order(f"r-{i}", "ab", samples=2, seed=i))
    queue.queue.put(order("other", "ab", client="b"))
    queue.run()
    assert compiled == ["ab", "ab"] and len(queue.made) == 21 and not queue.queue._waiting
    first, second = queue.requests[0].mask, queue.requests[1].mask
    (token,) = allowed(first)
    first.accept(token)
    assert allowed(second) == {token} != allowed(first), "each has its own position"


def test_what_no_request_uses_is_forgotten(tokenizer: Tokenizer, compiled: list[Any]) -> None:
    queue = Queue(tokenizer)
    for _ in range(2):
        queue.queue.put(order("r", "a+"))
        queue.run()
        queue.requests.clear()
        gc.collect()
    assert compiled == ["a+", "a+"] and not queue.queue._masks._origins


def test_a_grammar_whose_mask_failed_is_not_shared_any_more(
    tokenizer: Tokenizer, compiled: list[Any]
) -> None:
    make = SharedMasks().of("a")
    [request] = requests_of(order("r", "a+"), tokenizer, make)
    mask: Any = request.mask
    mask._mask._busy.acquire()  # as if a slow mask had been abandoned
    with pytest.raises(JengineError, match="took too long"):
        mask.fill(np.zeros(16, np.uint32))
    requests_of(order("s", "a+"), tokenizer, make)
    assert compiled == ["a+", "a+"]


def test_what_has_been_ended_is_not_compiled(tokenizer: Tokenizer, compiled: list[Any]) -> None:
    """The client has gone: its other prompts cost nothing."""
    queue = Queue(tokenizer)
    for i in range(100):
        queue.queue.put(order(f"r-{i}", f"a{{{i + 1}}}", samples=2))
    for i in range(100):
        assert queue.queue.end(f"r-{i}")
        if i != 3:
            assert queue.queue.end(f"r-{i}/1")
    assert not queue.queue.end("r-0") and not queue.queue.end("unknown")
    queue.run()
    assert compiled == ["a{4}"] and queue.made == [["r-3/1"]] and not queue.queue._waiting


def test_another_client_waits_for_one_compilation(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is compiled at a barrier while the others come."""
    compile_structure, order_of = masks.compile_structure, []
    entered, leave = threading.Event(), threading.Event()

    def held(what: Any, tokenizer: Tokenizer) -> Any:
        order_of.append(what.regex)
        entered.set()
        assert leave.wait(30)
        return compile_structure(what, tokenizer)

    monkeypatch.setattr(masks, "compile_structure", held)
    done = threading.Semaphore(0)
    queue = MaskQueue(lambda: tokenizer, lambda made: done.release())
    queue.start()
    queue.put(order("many-0", "a{1}", client="many"))
    assert entered.wait(30)
    for i in range(1, 30):
        queue.put(order(f"many-{i}", f"a{{{i + 1}}}", client="many"))
    queue.put(order("one", "b", client="one"))
    for i in range(5, 30):
        assert queue.end(f"many-{i}")
    leave.set()
    for _ in range(6):
        assert done.acquire(timeout=30)
    assert order_of == ["a{1}", "b", "a{2}", "a{3}", "a{4}", "a{5}"]


def test_an_error_is_that_of_its_prompt(tokenizer: Tokenizer) -> None:
    made: list[Made] = []
    queue = MaskQueue(lambda: tokenizer, made.append)
    queue.put(order("bad", "(", samples=3))
    assert queue.end("bad/1")
    following = queue._turns.take()
    assert following is not None
    queue.make(following[1])
    [(ids, error)] = made  # type: ignore[misc]
    assert sorted(ids) == ["bad", "bad/2"] and "llguidance cannot read it" in str(error)
