"""Step records of an engine with a model."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jengine import LLM, AsyncLLM, EngineDead, SamplingParams, Trace, explain
from jengine.engine.loop.engine import Engine
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, prompts, run

OPTIONS = {**SMALL, "max_model_len": 192}
PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def test_steps_and_requests(text_model: Path, tmp_path: Path) -> None:
    with on_demand(), LLM(text_model, progress=False, **OPTIONS) as llm:
        llm.generate(["The quick brown fox"] * 8 + ["jumps" * 30], PARAMS, use_tqdm=False)
        trace = llm.trace()
        costs = llm.costs()
        explanation = llm.explain()
    with pytest.raises(EngineDead):
        llm.trace()
    steps = trace.steps
    assert len(trace.requests) == 9 and {request.reason for request in trace.requests} == {"length"}
    assert sum(step.rows + bool(step.chunks) for step in steps) >= 29
    assert max(step.waiting for step in steps) > 0 and {step.compiles for step in steps} == {
        steps[0].compiles
    }
    assert all(step.predicted > 0.0 and step.begun < step.dispatched <= step.ended for step in steps)
    assert any(step.text > 0.0 for step in steps)
    for before, after in pairwise(steps):
        assert after.begun > before.begun and after.ended > before.ended
        assert before.seconds <= after.ended - before.begun + 1e-6
    for request in trace.requests:
        assert 0.0 < request.arrival <= request.scheduled <= request.first_token <= request.ended
        assert request.output_tokens == 30
    assert {step.name.split()[0] for step in steps} <= {trunk.program for trunk in costs.trunks}
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace
    assert explanation.steps == len(steps) and sum(explanation.shares.values()) == pytest.approx(1.0)


def test_a_compilation_is_found(engine: Engine) -> None:
    """Only this is tested on a real engine: other findings depend on the load of this machine."""
    assert "compilation" not in [finding.name for finding in explain(engine.trace()).findings]
    at, vocab = iter(range(1000)), engine.model.vocab_size

    def each_step() -> None:
        if next(at) == 20:
            jax.jit(lambda x: x * 5 + 77)(jnp.zeros(9)).block_until_ready()

    run(engine, [(prompt, PARAMS) for prompt in prompts(4, vocab=vocab, longest=40)], each_step)
    found = {finding.name: finding for finding in explain(engine.trace()).findings}
    assert int(found["compilation"].evidence["compilations"]) >= 1


def test_masks_have_a_stage(engine: Engine) -> None:
    run(engine, [([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=10, allowed_token_ids=[5, 6]))])
    last = list(engine.records.steps)[-8:]
    assert all(step.mask > 0.0 and not step.device and step.dispatched > step.begun for step in last)


def test_an_async_llm_tells_too(text_model: Path) -> None:
    async def main() -> None:
        with on_demand():
            llm = AsyncLLM(text_model, progress=False, speculative_config="none", **OPTIONS)
        async with llm:
            async for _ in llm.generate("The quick", PARAMS):
                pass
            trace = await llm.trace()
            assert [request.output_tokens for request in trace.requests] == [30] and len(trace.steps) == 30
            assert (await llm.explain(600.0)).steps == 30
            assert not (await llm.trace(1e-9)).steps
            prompt = trace.steps[0].prompt_rows
            assert 0 < prompt < 8 and llm.backend.totals.rows == prompt + 29
        with pytest.raises(EngineDead):
            await llm.trace()

    asyncio.run(main())
