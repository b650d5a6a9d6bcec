"""LoRA adapters in the engine, compared with PEFT and with themselves alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jengine import LLM, AsyncLLM, InvalidArgument, LoRARequest
from jengine.api import async_llm
from jengine.api.shared_engine import ThreadCall
from jengine.capacity.simulation.trace import read_trace
from jengine.checkpoints.folder import DEMO
from jengine.core.config import EngineConfig
from jengine.core.request import MAX_LOGPROBS, RequestOutput, SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ListLoras, ResetPrefixCache, UnloadLora
from jengine.engine.start import start_engine
from tests.engine.invariance import OPTIONS
from tests.engine.loras import GREEDY, TARGETS, add, load, prompts, results, run_adapted
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.engine.test_golden import assert_equal
from tests.golden.loras import SETTINGS, VARIANTS_WITH_LORA, lora, write_lora, write_merged
from tests.golden.weights import Golden, max_model_len, write_model

IN_CI = {"llama_gqa", "phi3_window", "qwen3_moe"}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
MANY: dict[str, Any] = {**LORA, "max_loras": 8}


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    """With places for two adapters."""
    return make_engine(**LORA)


@pytest.mark.parametrize(
    "variant",
    [v if v in IN_CI else pytest.param(v, marks=pytest.mark.full) for v in VARIANTS_WITH_LORA],
)
def test_tokens_and_logprobs_are_those_of_peft(variant: str, make_engine: Callable[..., Engine]) -> None:
    """Two adapters, with different ranks and scales, and the model alone share every step. Then one is alone,
    in programs for fewer places.
    """
    engine = make_engine(variant, **{**LORA, "max_loras": 4}, **TARGETS.get(variant, {}))
    for name in SETTINGS:
        load(engine, name, lora(variant, name))
    check_goldens(engine, variant)
    engine.do(ResetPrefixCache())
    check_goldens(engine, variant, only="plain")
    assert {0, 1, 4} >= {step.trunk.adapted for step in engine.trace().steps} >= {1, 4}


def check_goldens(engine: Engine, variant: str, only: str = "") -> None:
    """Compares a batch of all cases, with adapters and without, with what was recorded. only: an adapter."""
    adapted, base = Golden.read(f"lora_{variant}").cases, Golden.read(variant).cases[:2]
    names = [name for name in SETTINGS for _ in range(len(adapted) // len(SETTINGS))] + [None] * len(base)
    cases = [*adapted, *base]
    how = {"temperature": 0.0, "ignore_eos": True, "logprobs": MAX_LOGPROBS}
    work = [
        (case.prompt.tolist(), SamplingParams(max_tokens=len(case.tokens), **how), name)
        for case, name in zip(cases, names, strict=True)
    ]
    both = [pair for pair in zip(work, cases, strict=True) if only in ("", pair[0][2])]
    for answer, (_, case) in zip(run_adapted(engine, [one for one, _ in both]), both, strict=True):
        assert_equal(answer, case)


@pytest.mark.parametrize("variant", ["qwen3_next", pytest.param("qwen3_5_text", marks=pytest.mark.full)])
def test_a_delta_net_with_an_adapter_is_the_merged_model(
    variant: str, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """All of its linear layers are adapted, also the small ones that are never quantized."""
    engine, adapter = make_engine(variant, dtype="float32", **LORA), lora(variant, "plain")
    assert any("in_proj_" in name for name in adapter.tensors)
    load(engine, "x", adapter)
    write_model(tmp_path / "base", variant)
    folder = write_merged(tmp_path / "merged", tmp_path / "base", adapter)
    options = {"max_model_len": max_model_len(variant), **SMALL, "dtype": "float32"}
    with on_demand():
        merged = start_engine(EngineConfig.of(str(folder), options), progress=False)[0]
    texts = prompts(2, 70, engine.model.vocab_size)
    found = run_adapted(engine, [(prompt, GREEDY, "x") for prompt in texts])
    expected = run_adapted(merged, [(prompt, GREEDY, None) for prompt in texts])
    base = run_adapted(engine, [(prompt, GREEDY, None) for prompt in texts])
    for one, other, without in zip(found, expected, base, strict=True):
        (tokens, logprobs), (wanted, wanted_logprobs) = (zip(*results(a), strict=True) for a in (one, other))
        assert tokens == wanted != tuple(without.tokens)
        np.testing.assert_allclose(logprobs, wanted_logprobs, atol=1e-4)


def test_eight_adapters_and_the_model_in_one_batch_have_the_bits_of_each_alone(
    make_engine: Callable[..., Engine],
) -> None:
    """The order changes the adapters' places between the runs."""
    engine = make_engine(optimized=True, dtype="float32", **OPTIONS, **MANY)
    names = [None, *(f"adapter {i}" for i in range(9))]
    for name in names[1:]:
        load(engine, str(name), lora("llama_gqa", "plain", str(name)))
    work = [(prompt, GREEDY, name) for prompt, name in zip(prompts(10, 21), names, strict=True)]
    alone = [results(run_adapted(engine, [one])[0]) for one in reversed(work)][::-1]
    engine.do(ResetPrefixCache())
    assert len({str(one) for one in alone}) == len(alone)
    together = [results(answer) for answer in run_adapted(engine, work)]
    assert together == alone


def test_a_request_waits_for_a_place_and_base_requests_pass_it(engine: Engine) -> None:
    """Two adapters run, and two wait. All give what they give alone."""
    names = ["a", "b", "c", "d"]
    for name in names:
        load(engine, name, lora("llama_gqa", "plain", name))
    work = [(prompt, GREEDY, name) for prompt, name in zip(prompts(5, 9), [*names, None], strict=True)]
    alone = [run_adapted(engine, [one])[0].tokens for one in work]
    seen = set()

    def note() -> None:
        infos = engine.do(ListLoras())
        seen.add((sum(info.running for info in infos), sum(info.waiting for info in infos)))
        assert sum(info.on_device for info in infos) <= 2

    answers = run_adapted(engine, work, note)
    assert [answer.tokens for answer in answers] == alone
    assert (2, 2) in seen
    first = [answer.sequence.scheduled for answer in answers]
    assert first[4] < first[2], "the base request was admitted while the third adapter waited"

    def unload() -> None:
        for info in engine.do(ListLoras()):
            engine.do(UnloadLora(info.name))

    engine.do(ResetPrefixCache())
    # two of the adapters are unloaded while their requests wait for a place
    assert [answer.tokens for answer in run_adapted(engine, work, unload)] == [*alone]
    assert engine.loras.packed == {}  # type: ignore[union-attr]


def test_an_adapter_that_is_unloaded_serves_its_requests_to_the_end(engine: Engine) -> None:
    load(engine, "x", lora("llama_gqa", "plain"))
    prompt = prompts(1, 12)[0]
    alone = run_adapted(engine, [(prompt, GREEDY, "x")])[0].tokens
    engine.do(ResetPrefixCache())
    [answer] = add(engine, 0, (prompt, GREEDY, "x"))
    engine.step()
    engine.do(UnloadLora("x"))
    assert engine.do(ListLoras()) == []
    with pytest.raises(InvalidArgument, match="lora_request='x': no adapter of this name is loaded"):
        add(engine, 1, (prompt, GREEDY, "x"))
    # another adapter of the same name finds none of its pages, and does not disturb it
    load(engine, "x", lora("llama_gqa", "plain", "other"))
    [other] = add(engine, 2, (prompt, GREEDY, "x"))
    while engine.has_work:
        for update in engine.step():
            (answer if update.request_id == answer.sequence.request_id else other).updates.append(update)  # type: ignore[arg-type]
        engine.scheduler.check_integrity()
    assert answer.tokens == alone and other.tokens != alone
    assert len(engine.loras.packed) == 1  # type: ignore[union-attr]
    engine.do(UnloadLora("x"))


def test_pages_are_shared_within_an_adapter_only(engine: Engine) -> None:
    for name in "xy":
        load(engine, name, lora("llama_gqa", "plain", name))
    prompt = prompts(1, 40)[0]
    cached = [
        run_adapted(engine, [(prompt, GREEDY, name)])[0].sequence.num_cached
        for name in ("x", "x", "y", None, None, "y")
    ]
    assert cached == [0, 32, 0, 0, 32, 32]
    load(engine, "x", lora("llama_gqa", "plain", "x"), load_inplace=True)
    assert run_adapted(engine, [(prompt, GREEDY, "x")])[0].sequence.num_cached == 0
    for name in "xy":
        engine.do(UnloadLora(name))


def test_samples_bursts_and_scores(make_engine: Callable[..., Engine], engine: Engine) -> None:
    """What else steps do, with an adapter."""
    load(engine, "x", lora("llama_gqa", "plain"))
    prompt = prompts(1, 37)[0]
    sampled = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True, logprobs=0)
    scored = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    several = run_adapted(engine, [(prompt, sampled, "x"), (prompt, sampled, None)])
    ones = [
        run_adapted(engine, [(prompt, sampled, name)]) for name in ("x", None)
    ]  # from the cache, and alone
    assert [a.tokens for a in several] == [a.tokens for one in ones for a in one]
    assert several[0].tokens != several[3].tokens
    [own, base] = run_adapted(engine, [(prompt, scored, "x"), (prompt, scored, None)])
    assert own.scores[0].logprobs != base.scores[0].logprobs
    bursts = make_engine(**LORA, num_scheduler_steps=8)
    load(bursts, "x", lora("llama_gqa", "plain"))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    work = [(prompt, params, "x"), (prompt, params, None)]
    got = run_adapted(bursts, work)
    assert any(step.steps == 8 for step in bursts.trace().steps)
    want = run_adapted(engine, work)
    assert [a.tokens for a in got] == [a.tokens for a in want]
    assert got[0].tokens[:4] == own.tokens
    engine.do(UnloadLora("x"))


def test_bursts_and_scores_with_an_adapted_head(make_engine: Callable[..., Engine]) -> None:
    """And an adapted embedding, where both are one table."""
    variant = "qwen2_tied"
    engine = make_engine(variant, **LORA, **TARGETS[variant], num_scheduler_steps=8)
    load(engine, "x", lora(variant, "plain"))
    case, base = Golden.read(f"lora_{variant}").cases[1], Golden.read(variant).cases[1]
    params = SamplingParams(temperature=0.0, max_tokens=len(case.tokens), ignore_eos=True)
    work = [(case.prompt.tolist(), params, "x"), (base.prompt.tolist(), params, None)]
    assert [one.tokens for one in run_adapted(engine, work)] == [case.tokens.tolist(), base.tokens.tolist()]
    assert any(step.steps == 8 for step in engine.trace().steps)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    for one, name in ((case, "x"), (base, None)):
        tokens = [*one.prompt.tolist(), *one.tokens.tolist()]
        [answer] = run_adapted(engine, [(tokens, scored, name)])
        found = [score for part in answer.scores for score in part.logprobs][-len(one.tokens) :]
        wanted = one.logits - np.logaddexp.reduce(one.logits, axis=1, keepdims=True)
        for token, score, row in zip(one.tokens.tolist(), found, wanted, strict=True):
            assert score.chosen == pytest.approx(row[token], abs=1e-4)


def test_llm_loads_an_adapter_at_its_first_use(tmp_path: Path) -> None:
    arrays = lora("llama_gqa", "plain", config=json.loads((DEMO / "config.json").read_text()))
    path = str(write_lora(tmp_path / "adapter", arrays))
    options = {"max_model_len": 128, "record_trace": str(tmp_path / "trace"), **SMALL, **LORA}
    with on_demand(), LLM("demo", progress=False, **options) as llm:
        request, params = LoRARequest("sql", 1, path), SamplingParams(temperature=0.0, max_tokens=6)
        ids = [prompts(1, 9)[0]] * 2
        with_adapter, without = llm.generate(ids, params, use_tqdm=False, lora_request=[request, None])
        assert [info.name for info in llm.loras.list()] == ["sql"]
        assert with_adapter.outputs[0].token_ids != without.outputs[0].token_ids
        assert [one.lora for one in llm.engine.trace().requests] == ["sql", ""]
        again = list(llm.stream(ids[0], params, lora_request="sql"))[-1]
        assert again.outputs[0].token_ids == with_adapter.outputs[0].token_ids
        llm.loras.load("memory", config=arrays.config, tensors=arrays.tensors)
        [trained] = llm.generate(ids[0], params, use_tqdm=False, lora_request="memory")
        assert trained.outputs[0].token_ids == with_adapter.outputs[0].token_ids
        llm.loras.unload("sql")
        with pytest.raises(InvalidArgument, match="lora_request='sql': is not loaded"):
            llm.generate(ids[0], params, use_tqdm=False, lora_request="sql")
    assert "sql" not in (tmp_path / "trace").read_text()  # names are hashed
    first, base, second, memory = read_trace(tmp_path / "trace").loras or ()
    assert base is None and first == second != memory is not None


def test_async_llm_and_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads at the first use, and an adapter that is unloaded meanwhile ends its request alone."""
    arrays = lora("llama_gqa", "plain", config=json.loads((DEMO / "config.json").read_text()))
    paths = [str(write_lora(tmp_path / str(i), arrays)) for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    async def outputs(llm: AsyncLLM, lora_request: LoRARequest | str | None) -> RequestOutput:
        found = [one async for one in llm.generate([5, 6, 7], params, lora_request=lora_request)]
        return found[-1]

    async def check() -> None:
        options = {"max_model_len": 128, **SMALL, **LORA, "max_cpu_loras": 2}
        with on_demand():
            llm = AsyncLLM("demo", progress=False, **options)
        async with llm:
            requests = [LoRARequest(f"a{i}", 1, path) for i, path in enumerate(paths)]
            first, again, base = await asyncio.gather(
                outputs(llm, requests[0]), outputs(llm, requests[0]), outputs(llm, None)
            )
            assert first.outputs[0].token_ids == again.outputs[0].token_ids != base.outputs[0].token_ids
            for request in requests[1:]:
                assert (await outputs(llm, request)).outputs[0].token_ids == first.outputs[0].token_ids
            assert [*llm.loras.by_name] == ["a1", "a2"], "the one that was used least recently made way"
            with pytest.raises(InvalidArgument, match="max_cpu_loras=2 adapters are loaded"):
                await llm.loras.load(requests[0])
            with pytest.raises(InvalidArgument, match="lora_request='a0': is not loaded"):
                llm.submit([5], params, lora_request="a0")
            with pytest.raises(InvalidArgument, match="'a1': an adapter of this name is loaded"):
                await outputs(llm, LoRARequest("a1", 1, paths[2]))
            unloading = asyncio.ensure_future(llm.do(UnloadLora("a1")))  # behind the back of llm.loras
            await asyncio.sleep(0)
            async with llm.submit([5, 6], params, lora_request="a1") as handle:
                last = [one async for one in handle][-1]
            await unloading
            assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("abort", "unloaded")
            unloading = asyncio.ensure_future(llm.loras.unload("a2"))
            await asyncio.sleep(0)
            with pytest.raises(InvalidArgument, match="lora_request='a2': is not loaded"):
                llm.submit([5], params, lora_request="a2")
            await unloading
            assert (await outputs(llm, requests[2])).outputs[0].token_ids == first.outputs[0].token_ids
            await llm.loras.unload("a2")
            await asyncio.gather(*(llm.loras.require(request) for request in requests))
            assert [*llm.loras.by_name] == ["a1", "a2"], "those that come together make room, too"

            loop, prepare = asyncio.get_running_loop(), llm.prepare

            def while_another_is_loaded(*args: Any) -> Any:
                asyncio.run_coroutine_threadsafe(llm.loras.require(requests[0]), loop).result()
                return prepare(*args)

            monkeypatch.setattr(async_llm, "is_slow", lambda prompt: True)
            monkeypatch.setattr(llm, "prepare", while_another_is_loaded)
            assert (await outputs(llm, requests[1])).outputs[0].token_ids == first.outputs[0].token_ids

    asyncio.run(check())


def test_adapters_of_one_call_do_not_make_room_for_each_other(tmp_path: Path) -> None:
    """Neither new ones nor one that was used long ago."""
    arrays = lora("llama_gqa", "plain", config=json.loads((DEMO / "config.json").read_text()))
    a, b, c, d = (LoRARequest(name, 1, str(write_lora(tmp_path / name, arrays))) for name in "abcd")
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with on_demand(), LLM("demo", progress=False, max_model_len=128, **SMALL, **LORA, max_cpu_loras=2) as llm:

        def loaded_after(*requests: LoRARequest) -> list[str]:
            outputs = llm.generate([[5]] * len(requests), params, use_tqdm=False, lora_request=[*requests])
            assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
            return [info.name for info in llm.loras.list()]

        assert loaded_after(a) == ["a"] and loaded_after(b) == ["a", "b"]
        assert loaded_after(a, c) == ["a", "c"]
        assert loaded_after(b, d) == ["b", "d"]
        with pytest.raises(InvalidArgument, match="max_cpu_loras=2 adapters are loaded; all of them are in"):
            loaded_after(a, b, c)
        assert "b" in loaded_after(b)
        for other in (LoRARequest("b", 2, b.lora_path), LoRARequest("b", 1, a.lora_path)):
            with pytest.raises(InvalidArgument, match="'b': an adapter of this name is loaded"):
                loaded_after(other)
        llm.loras.load(LoRARequest("b", 2, a.lora_path), load_inplace=True)
        assert "b" in loaded_after(LoRARequest("b", 2, a.lora_path), LoRARequest("b"))


def test_threads_that_need_more_adapters_than_may_be_loaded(tmp_path: Path) -> None:
    """Threads load one adapter at the same time, and one is unloaded before its request is queued: only that
    request fails.
    """
    arrays = lora("llama_gqa", "plain", config=json.loads((DEMO / "config.json").read_text()))
    paths = [str(write_lora(tmp_path / str(i), arrays)) for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with on_demand(), LLM("demo", progress=False, max_model_len=128, **SMALL, **LORA) as llm:
        expected = llm.generate([5, 6], params, use_tqdm=False)[0].outputs[0].token_ids

        def ask(i: int) -> set[str | None]:
            """The reasons for which requests without an adapter, or with one, have ended."""
            if i % 4 == 3:
                assert llm.generate([5, 6], params, use_tqdm=False)[0].outputs[0].token_ids == expected
                return {"length"}
            request = LoRARequest(f"a{i % 4}", 1, paths[i % 4])
            [output] = llm.generate([5, 6], params, use_tqdm=False, lora_request=request)
            return {output.outputs[0].finish_reason}

        with ThreadPoolExecutor(8) as pool:
            assert {*chain(*pool.map(ask, range(32)))} == {"length"}

        llm.loras.load(LoRARequest("late", 1, paths[0]))
        step, late = llm.engine.step, ThreadCall()

        def unload_first() -> Any:
            """During a step, another thread's request comes, whose adapter is then unloaded."""
            llm.engine.step = step  # type: ignore[method-assign]
            llm._shared.open(late, [llm._requests.make_one([5, 6], params, lora_name="late")])
            llm._shared._orders.appendleft(lambda: llm.engine.do(UnloadLora("late")))
            return step()

        llm.engine.step = unload_first  # type: ignore[method-assign, assignment]
        assert llm.generate([5, 6], params, use_tqdm=False)[0].outputs[0].token_ids == expected
        [refused] = llm._shared.take(late)
        llm._shared.close(late)
        assert (refused.outputs[0].finish_reason, refused.outputs[0].stop_reason) == ("abort", "unloaded")
        assert llm.generate([5, 6], params, use_tqdm=False)[0].outputs[0].token_ids == expected


@pytest.mark.full
def test_two_hundred_adapters_in_turn(make_engine: Callable[..., Engine]) -> None:
    """Through eight places, some of them loaded while others run."""
    engine = make_engine(**MANY)
    count, work = 200, prompts(200, 7)
    for i in range(count):
        load(engine, str(i), lora("llama_gqa", "plain", str(i)))
    together = [one.tokens for one in run_adapted(engine, [(p, GREEDY, str(i)) for i, p in enumerate(work)])]
    engine.do(ResetPrefixCache())
    for i in np.random.default_rng(0).permutation(count).tolist():
        assert run_adapted(engine, [(work[i], GREEDY, str(i))])[0].tokens == together[i]
        engine.do(UnloadLora(str(i)))
    assert engine.loras.packed == {}  # type: ignore[union-attr]
