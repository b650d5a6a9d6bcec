"""Structured output with the demo model: complete outputs satisfy the constraint, and errors end only their
own request.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jengine import LLM, AsyncLLM, CompletionOutput, SamplingParams
from jengine.api.backend import EngineThread
from jengine.api.shared_engine import ThreadCall
from jengine.core.request import Request, TokenMask
from jengine.engine.loop import engine as engine_module
from jengine.engine.loop.engine import Engine
from jengine.text.mask_thread import MASK_SECONDS
from jengine.text.masks import make_mask
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, limit_pages
from tests.engine.structures import Structure, structures

COUNT = 100
PROMPT = '[1, 2]\n{"a":"b","c":null}\n{"d":[true]}\n'
PLAIN = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
BEYOND = {"regex": "(.{0,200}a.{0,200}b.{0,200}){5}"}  # llguidance takes it, and gives up after some tokens


@pytest.fixture(scope="module")
def llm() -> LLM:
    with on_demand():
        return LLM("demo", progress=False, **{**SMALL, "num_pages": 400}, max_model_len=400)


def params(structure: Structure, seed: int, temperature: float) -> SamplingParams:
    """The penalty prevents a small model from generating white space forever."""
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=300,
        frequency_penalty=0.5,
        structured_outputs=structure.asked,
        logprobs=0,
    )


def assert_valid(wanted: list[Structure], got: list[CompletionOutput], llm: LLM) -> None:
    """Checks all outputs. A few may be cut off; these must be prefixes of valid ones."""
    cut = 0
    for structure, completion in zip(wanted, got, strict=True):
        if completion.finish_reason == "length":
            cut += 1
            assert_begins(structure, completion, llm)
        else:
            assert completion.finish_reason == "stop" and completion.stop_reason is None
            assert structure.judge(completion.text), (structure.asked, completion.text)
    assert cut <= len(wanted) * 0.05


def assert_begins(structure: Structure, completion: CompletionOutput, llm: LLM) -> None:
    """Checks with a mask that has accepted the same tokens that each was allowed, and that the text can
    continue.
    """
    mask = make_mask(SamplingParams(structured_outputs=structure.asked), llm.tokenizer)
    assert mask is not None
    for token in [*completion.token_ids, None]:
        words = np.full(-(-llm.tokenizer.vocab_size // 32), 0xFFFFFFFF, np.uint32)
        mask.fill(words)
        if token is None:
            assert words.any()
        else:
            assert words[token // 32] >> (token % 32) & 1
            mask.accept(token)


def check_all(llm: LLM, seed: int, temperature: float) -> None:
    """Also runs requests without structure, whose tokens must not change."""
    wanted = structures(COUNT, seed)
    work = [params(structure, i, temperature) for i, structure in enumerate(wanted)]
    outputs = [
        output.outputs[0]
        for output in llm.generate([PROMPT] * (COUNT + 8), [PLAIN] * 4 + work + [PLAIN] * 4, use_tqdm=False)
    ]
    assert_valid(wanted, outputs[4:-4], llm)
    alone = llm.generate(PROMPT, PLAIN, use_tqdm=False)[0].outputs[0]
    assert all(output.token_ids == alone.token_ids for output in outputs[:4] + outputs[-4:])
    assert llm.stats["compiles_since_start"] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_output_is_valid(temperature: float, llm: LLM) -> None:
    check_all(llm, 0, temperature)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_more_outputs_are_valid(seed: int, temperature: float, llm: LLM) -> None:
    check_all(llm, seed, temperature)


def test_judges_can_say_no() -> None:
    for structure in structures(COUNT, 0):
        assert not structure.judge("neither this nor that")


SHORT = {"regex": "[0-9]{2}"}


@pytest.mark.parametrize(
    "more",
    [
        {"min_tokens": 20},
        {"allowed_token_ids": [*range(100)], "min_tokens": 3},
        {"bad_words": ["zzz"], "min_tokens": 9},
        {"min_tokens": 20, "stop_token_ids": [*range(200, 300)]},
    ],
)
def test_a_complete_structure_ends_the_output(more: dict[str, object], llm: LLM) -> None:
    """Whatever else is asked for, if nothing may follow it."""
    assert llm.tokenizer.eos_token_id is not None
    if "allowed_token_ids" in more:
        digits = [llm.tokenizer.encode(digit, add_special_tokens=False) for digit in "0123456789"]
        more = {**more, "allowed_token_ids": [token for digit in digits for token in digit]}
    params = SamplingParams(temperature=1.0, max_tokens=40, structured_outputs=SHORT, seed=1, **more)  # type: ignore[arg-type]
    for completion in llm.generate(PROMPT, params.clone(n=4), use_tqdm=False)[0].outputs:
        assert re.fullmatch("[0-9]{2}", completion.text) and completion.finish_reason == "stop", completion


def test_an_incomplete_structure_keeps_to_min_tokens(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=1,
        n=4,
        min_tokens=12,
        max_tokens=40,
        structured_outputs={"regex": "[0-9]{2,40}"},
    )
    for completion in llm.generate(PROMPT, params, use_tqdm=False)[0].outputs:
        assert len(completion.token_ids) > 12, completion


def test_preemption_changes_no_output(text_model: Path) -> None:
    """Masks keep their state; the tokens are computed again."""
    patterns = [f"(?:[a-z]{{2,3}}{i}){{12,14}}" for i in range(16)]
    work = [
        SamplingParams(seed=i, max_tokens=100, structured_outputs={"regex": pattern})
        for i, pattern in enumerate(patterns)
    ]
    got, preemptions = [], []
    for pages in (120, 12):
        with on_demand():
            llm = LLM(text_model, progress=False, **SMALL, max_model_len=192)
        limit_pages(llm.engine, pages)
        got.append(
            [output.outputs[0] for output in llm.generate([[9] * 30] * len(work), work, use_tqdm=False)]
        )
        preemptions.append(llm.stats["preemptions"])
    assert preemptions[0] == 0 < preemptions[1]
    assert [completion.token_ids for completion in got[0]] == [completion.token_ids for completion in got[1]]
    for pattern, completion in zip(patterns, got[1], strict=True):
        assert completion.finish_reason == "stop" and re.fullmatch(pattern, completion.text)


def test_the_tokenizers_end_of_sequence_ends_a_structure(text_model: Path) -> None:
    """This model's own configuration has none."""
    with on_demand():
        llm = LLM(text_model, progress=False, **SMALL, max_model_len=192)
    assert llm.engine.model.eos_token_ids == (llm.tokenizer.eos_token_id,)
    wanted = SamplingParams(structured_outputs={"choice": ["dog", "quick fox"]}, seed=1)
    completion = llm.generate("The", wanted, use_tqdm=False)[0].outputs[0]
    assert completion.text in ("dog", "quick fox") and (completion.finish_reason, completion.stop_reason) == (
        "stop",
        None,
    )


# --- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faulty, why",
    [
        ({"structured_outputs": BEYOND, "seed": 0, "temperature": 5.0}, "llguidance failed"),
        ({"structured_outputs": {"regex": "[ab]"}, "bad_words": ["a", "b"]}, "together allow no token"),
        (
            {"structured_outputs": {"regex": "[ab]{4}"}, "bad_words": ["a", "b", "ab"]},
            "together allow no token",
        ),
    ],
)
def test_a_request_that_cannot_go_on_ends_with_an_error(
    faulty: dict[str, object], why: str, llm: LLM
) -> None:
    work = [PLAIN, SamplingParams(**{"max_tokens": 200, **faulty}), PLAIN]  # type: ignore[arg-type]
    before, failed, after = (output.outputs[0] for output in llm.generate([PROMPT] * 3, work, use_tqdm=False))
    assert (
        failed.finish_reason == "error" and isinstance(failed.stop_reason, str) and why in failed.stop_reason
    )
    assert (
        before.token_ids
        == after.token_ids
        == llm.generate(PROMPT, PLAIN, use_tqdm=False)[0].outputs[0].token_ids
    )
    assert llm.engine.scheduler.blocks.owned == 0 and not llm.engine.has_work


class Faulty:
    """A mask that allows everything, and fails at one of its calls."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def _call(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError("a fault")

    def fill(self, words: np.ndarray) -> None:
        self._call()

    def accept(self, token: int) -> None:
        self._call()

    def rollback(self, count: int) -> None:
        self._call()

    def forced(self) -> list[int]:
        return []

    def free(self) -> int:
        return 0


def beside(llm: LLM, mask: TokenMask) -> tuple[CompletionOutput, list[int]]:
    """The output of a request with this mask. Another request runs with it, and must get the same tokens as
    alone.
    """
    ids = llm.tokenizer.encode(PROMPT)
    given = [
        Request(request_id=f"beside{i}", prompt_token_ids=ids, params=PLAIN, mask=mask if i else None)
        for i in range(2)
    ]
    call = ThreadCall()
    llm._shared.open(call, [[request] for request in given])
    plain, faulty = call.outputs
    while not (plain.finished and faulty.finished):
        llm._shared.take(call)
    llm._shared.close(call)
    tokens = plain.outputs[0].token_ids
    assert tokens == llm.generate(PROMPT, PLAIN, use_tqdm=False)[0].outputs[0].token_ids
    return faulty.outputs[0], tokens


@pytest.mark.parametrize("calls", [0, 1, 4, 5])  # even: `fill` fails
def test_a_fault_in_a_mask_ends_its_request_alone(calls: int, llm: LLM) -> None:
    failed, tokens = beside(llm, Faulty(calls))
    assert (failed.finish_reason, failed.stop_reason) == ("error", "ZeroDivisionError: a fault")
    # with the one that could not be accepted: it was sampled as it should be
    assert failed.token_ids == tokens[: (calls + 1) // 2]


class Slow:
    """A mask that computes for seconds."""

    def fill(self, words: np.ndarray) -> None:
        until = time.thread_time() + 10 * MASK_SECONDS
        while time.thread_time() < until:
            pass

    def accept(self, token: int) -> None:
        pass

    def rollback(self, count: int) -> None:
        pass

    def forced(self) -> list[int]:
        return []

    def free(self) -> int:
        return 0


def test_a_slow_mask_ends_its_request_alone(llm: LLM) -> None:
    failed, _ = beside(llm, Slow())
    assert (failed.finish_reason, failed.stop_reason) == (
        "error",
        f"its token mask took more than {MASK_SECONDS} s",
    )
    assert not failed.token_ids


def test_a_mask_that_was_given_up_fails_no_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "masked_rows", lambda plan, by_number: [(0, None, ())])
    monkeypatch.setattr(engine_module, "fill_masks", lambda rows, sequence, drafts: (1, ValueError()))
    calls = list[Callable[[], None]]()
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(vocab_size=32),
        scheduler=SimpleNamespace(registry=SimpleNamespace(by_number={})),
        _masks=SimpleNamespace(run=lambda made: calls.extend(made) or {}),
    )
    for _ in range(2):
        Engine._mask(engine, SimpleNamespace(sampler=SimpleNamespace(rows=1)))  # type: ignore[arg-type]
    calls[0]()
    assert not engine._unmasked
    calls[1]()
    assert [*engine._unmasked] == [1]


def test_online_the_caller_is_told_and_the_engine_lives(llm: LLM) -> None:
    async def both() -> list[CompletionOutput]:
        wanted = [SamplingParams(structured_outputs={"regex": "[ab]"}, bad_words=["a", "b"]), PLAIN]
        async with AsyncLLM.over(EngineThread(llm.engine), llm.tokenizer) as online:
            return [
                [output async for output in online.generate(PROMPT, one, output_kind="final")][-1].outputs[0]
                for one in wanted
            ]

    failed, plain = asyncio.run(both())
    assert failed.finish_reason == "error" and plain.finish_reason == "length"
