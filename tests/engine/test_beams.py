"""Beam search in the engine, compared with transformers' logits and beams and with vLLM's answers; beside
other requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jengine import LLM, AsyncLLM, BeamSearchParams, InvalidArgument, SamplingParams
from jengine.api.backend import EngineThread
from jengine.core.beam_outputs import sampling_of
from jengine.core.request import Request
from jengine.core.updates import Beam, BeamsFound
from jengine.engine.loop.engine import Engine
from tests.engine.counting import assert_idle
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.golden.vllm.cases import BEAM_ANSWERS, BEAMS

TEXT = "The quick brown fox"
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent.parent / "golden" / "beams.json").read_text())
VLLM: dict[str, Any] = json.loads(BEAM_ANSWERS.read_text())
QUICK = {"gemma2"}  # full attention and windows; the rest differ outside what beams add
VARIANTS = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.full)
    for name in RECORDED
    if name != "versions"
]


def search(
    engine: Engine,
    work: list[tuple[list[int], BeamSearchParams]],
    each_step: Callable[[], object] = lambda: None,
) -> list[list[Beam]]:
    found: dict[str, list[Beam]] = {}
    for i, (prompt, params) in enumerate(work):
        request = Request(
            request_id=str(i), prompt_token_ids=prompt, params=sampling_of(params), beams=params
        )
        engine.limits.validate(request)
        engine.add(request)
    while engine.has_work:
        for update in engine.step():
            assert isinstance(update, BeamsFound) and update.request_id not in found
            found[update.request_id] = update.beams
        engine.scheduler.check_integrity()
        each_step()
    assert engine.scheduler.blocks.owned == 0
    return [found[str(i)] for i in range(len(work))]


def params_of(case: dict[str, Any]) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=case["width"],
        max_tokens=12,
        length_penalty=case["length_penalty"],
        ignore_eos=case["eos"] is None,
    )


def assert_equal(found: list[Beam], wanted: list[Any]) -> None:
    assert [beam.tokens for beam in found] == [tokens for tokens, _, _ in wanted]
    for beam, (_, cumulative, ended) in zip(found, wanted, strict=True):
        assert beam.cumulative == pytest.approx(cumulative, abs=1e-3)
        assert beam.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize("variant", VARIANTS)
def test_beams_are_those_of_transformers_logits(variant: str, make_engine: Callable[..., Engine]) -> None:
    """Beams are chosen by vLLM's rule. With length_penalty 0 they equal those of transformers' own search."""
    engine = make_engine(variant)
    model, owned = engine.model, 0

    def note() -> None:
        nonlocal owned
        owned = max(owned, engine.scheduler.blocks.owned)

    for case in RECORDED[variant]:
        engine.model = dataclasses.replace(model, eos_token_ids=() if case["eos"] is None else (case["eos"],))
        for _ in range(2):  # then from the prefix cache
            [found] = search(engine, [(case["prompt"], params_of(case))], note)
            assert_equal(found, case["beams"])
            if case["transformers"] is not None:
                assert_equal(found, case["transformers"])
    engine.model = dataclasses.replace(model, eos_token_ids=())
    ignoring = [case for case in RECORDED[variant] if case["eos"] is None]
    # in one batch, as far as there are slots
    together = search(engine, [(case["prompt"], params_of(case)) for case in ignoring])
    for found, case in zip(together, ignoring, strict=True):
        assert_equal(found, case["beams"])
    assert engine.compiles_since_start == 0 and owned > 0


def test_a_family_that_is_preempted_finds_the_same(make_engine: Callable[..., Engine]) -> None:
    """Each of them in turn, with steps in flight."""
    engine = make_engine()
    prompts = [[i + 1 + 3 * j for j in range(20)] for i in range(2)]
    params = BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True)
    alone = [search(engine, [(prompt, params)])[0] for prompt in prompts]
    steps = itertools.count(1)

    def preempt() -> None:
        running = [*engine.scheduler.registry.running]
        if next(steps) in (5, 17, 18, 40) and running:
            engine.scheduler.registry.preempt(running[-1])
            engine.scheduler.check_integrity()

    for found, expected in zip(
        search(engine, [(prompt, params) for prompt in prompts], preempt), alone, strict=True
    ):
        assert_equal(found, [(beam.tokens, beam.cumulative, False) for beam in expected])
    assert engine.scheduler.registry.num_preemptions == 4 and engine.compiles_since_start == 0


# Of users.


@pytest.fixture(scope="module")
def llm(text_model: Path) -> LLM:
    with on_demand():
        return LLM(text_model, progress=False, **SMALL, max_model_len=192)


@pytest.fixture
def online(llm: LLM) -> Iterator[AsyncLLM]:
    online = AsyncLLM.over(EngineThread(llm.engine), llm.tokenizer)
    yield online
    asyncio.run(online.close())
    assert_idle(online)


def test_one_beam_is_greedy(llm: LLM) -> None:
    greedy = llm.generate(
        TEXT, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0), use_tqdm=False
    )[0]
    [output] = llm.beam_search(TEXT, BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True))
    [beam] = output.sequences
    assert beam.tokens == [*greedy.prompt_token_ids, *greedy.outputs[0].token_ids]
    assert beam.text == llm.tokenizer.decode(beam.tokens)
    assert beam.cum_logprob == pytest.approx(greedy.outputs[0].cumulative_logprob)
    assert (beam.finish_reason, beam.stop_reason) == ("length", None)


def test_what_comes_back(llm: LLM) -> None:
    prompts = [TEXT, {"prompt_token_ids": [70, 71, 72]}, [73, 74]]
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    outputs = llm.beam_search(prompts, params)
    for one, other in zip(
        llm.beam_search(prompts, params, concurrency_limit=1), outputs, strict=True
    ):  # in other programs: bits may differ
        for mine, theirs in zip(one.sequences, other.sequences, strict=True):
            assert (mine.tokens, mine.text, mine.finish_reason) == (
                theirs.tokens,
                theirs.text,
                theirs.finish_reason,
            )
            assert mine.cum_logprob == pytest.approx(theirs.cum_logprob, abs=1e-4)
    for output in outputs:
        assert len(output.sequences) == 3
        for beam in output.sequences:
            chosen = beam.tokens[-len(beam.logprobs) :]
            assert [len(position) for position in beam.logprobs] == [6] * len(chosen)
            assert sum(
                position[token].logprob for token, position in zip(chosen, beam.logprobs, strict=True)
            ) == pytest.approx(beam.cum_logprob)
    assert "cum_logprob" in repr(outputs[0].sequences[0]) and "<pre" in outputs[0]._repr_html_()
    assert llm.engine.compiles_since_start == 0


def test_beams_and_others_do_not_change_each_other(llm: LLM) -> None:
    """Beams run in batches with sampled, masked and penalized requests, and wait for each of their steps."""
    beams = BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True)
    others = [
        SamplingParams(temperature=0.0, max_tokens=30),
        SamplingParams(seed=5, max_tokens=30, repetition_penalty=1.2, logprobs=2),
        SamplingParams(seed=6, max_tokens=20, allowed_token_ids=list(range(60, 90))),
    ]
    [alone] = llm.beam_search(TEXT, beams)
    answers = [llm.generate(TEXT, params, use_tqdm=False)[0].outputs[0] for params in others]

    async def together(online: AsyncLLM) -> tuple[list[Any], Any]:
        handles = [online.submit(TEXT, params, output_kind="final") for params in (beams, *others, beams)]
        outputs = [await anext(handle) for handle in handles]
        return [output.outputs[0] for output in outputs[1:-1]], [outputs[0], outputs[-1]]

    online = AsyncLLM.over(EngineThread(llm.engine), llm.tokenizer)
    given, found = asyncio.run(together(online))
    asyncio.run(online.close())
    assert [one.token_ids for one in given] == [one.token_ids for one in answers]
    for output in found:
        prompt = output.prompt_token_ids
        assert [[*prompt, *beam.token_ids] for beam in output.outputs] == [
            beam.tokens for beam in alone.sequences
        ]
        assert [beam.index for beam in output.outputs] == [0, 1, 2] and output.finished


def test_online_a_search_has_one_output(online: AsyncLLM) -> None:
    async def run() -> None:
        params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
        for kind in ("cumulative", "delta", "final"):
            outputs = [output async for output in online.generate(TEXT, params, output_kind=kind)]  # type: ignore[arg-type]
            [output] = outputs
            assert [len(beam.token_ids) for beam in output.outputs] == [
                8,
                8,
                8,
            ] and output.metrics.first_token is not None
            assert all(beam.logprobs is None and beam.cumulative_logprob for beam in output.outputs)
        handle = online.submit(TEXT, BeamSearchParams(beam_width=3, max_tokens=150, ignore_eos=True))
        assert handle.abort()
        assert [beam.finish_reason for beam in (await anext(handle)).outputs] == ["abort"]
        with pytest.raises(InvalidArgument, match=r"ttft_ms.*no targets"):
            online.submit(TEXT, params, ttft_ms=5.0)

    asyncio.run(run())


def test_what_cannot_be_searched_is_rejected(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=r"params.*must be a BeamSearchParams"):
        llm.beam_search(TEXT, SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"sampling_params.*must be a SamplingParams"):
        llm.generate(TEXT, BeamSearchParams(beam_width=2, max_tokens=2))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"beam_width.*max_num_seqs = 8"):
        llm.beam_search(TEXT, BeamSearchParams(beam_width=9, max_tokens=2))
    with pytest.raises(InvalidArgument, match=r"concurrency_limit"):
        llm.beam_search(TEXT, BeamSearchParams(beam_width=2, max_tokens=2), concurrency_limit=0)
    with pytest.raises(InvalidArgument, match=r"use_beam_search.*BeamSearchParams"):
        SamplingParams(use_beam_search=True)  # type: ignore[call-arg]
    assert llm.beam_search([], BeamSearchParams(beam_width=2, max_tokens=2)) == []


# vLLM's answers.


@pytest.mark.parametrize("name", BEAMS)
def test_vllms_answers(name: str, case_models: dict[str, LLM]) -> None:
    case = BEAMS[name]
    [output] = case_models[case.model].beam_search(
        case.prompt, BeamSearchParams(**case.params, include_stop_str_in_output=True)
    )
    for mine, theirs in zip(output.sequences, VLLM[name], strict=True):
        assert mine.tokens == theirs["tokens"] and mine.text == theirs["text"]
        assert mine.cum_logprob == pytest.approx(theirs["cum_logprob"], abs=1e-3)
    for position, recorded in zip(output.sequences[0].logprobs, VLLM[name][0]["logprobs"], strict=True):
        assert [(token, entry.rank) for token, entry in position.items()] == [
            (token, rank) for token, _, rank, _ in recorded
        ]
        assert [entry.logprob for entry in position.values()] == pytest.approx(
            [value for _, value, _, _ in recorded], abs=1e-4
        )
