"""AsyncLLM: outputs equal LLM's, every request ends once, no caller waits forever, and all pages are
released.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from jengine import LLM, AsyncLLM, InvalidArgument, RequestOutput, SamplingParams
from jengine.api.async_llm import OutputKind
from jengine.api.backend import EngineThread
from jengine.api.request_handle import RequestHandle
from jengine.core.request import CompletionOutput
from tests.engine.counting import LONG, TEXT, CountingRunner, assert_idle, collect, counting
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL

WORK = [
    (TEXT, SamplingParams(temperature=0.0, max_tokens=24)),
    ([5, 6, 7], SamplingParams(temperature=1.0, seed=3, max_tokens=40, logprobs=2)),
    (
        {"prompt_token_ids": [9] * 70},
        SamplingParams(temperature=0.9, top_k=20, seed=4, max_tokens=30, stop=["ex", "qu"]),
    ),
    (
        "naïve café",
        SamplingParams(
            temperature=1.2, seed=5, max_tokens=60, stop_token_ids=[7, 300, 301, 302, 303], min_tokens=4
        ),
    ),
    (
        TEXT,
        SamplingParams(
            temperature=0.8,
            seed=6,
            max_tokens=20,
            repetition_penalty=1.2,
            logit_bias={99: 2.0},
            prompt_logprobs=1,
        ),
    ),
]


@pytest.fixture(scope="module")
def llm(text_model: Path) -> LLM:
    with on_demand():
        return LLM(text_model, progress=False, **SMALL, max_model_len=192)


@pytest.fixture
def fresh(llm: LLM) -> Iterator[AsyncLLM]:
    """An AsyncLLM over the engine of `llm`, which is idle again afterwards."""
    online = AsyncLLM.over(EngineThread(llm.engine), llm.tokenizer)
    yield online
    asyncio.run(online.close())
    assert_idle(online)


async def wait_until_idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(10):
        while llm.backend.engine.has_work or llm._requests._handles:
            await asyncio.sleep(0.005)
    assert llm.backend.engine.scheduler.blocks.owned == 0


def joined(deltas: list[RequestOutput]) -> RequestOutput:
    """The sum of a request's deltas."""
    whole = dataclasses.replace(deltas[-1], prompt_logprobs=deltas[0].prompt_logprobs)
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])
    parts = [delta.outputs[0] for delta in deltas]
    logprobs = (
        None if parts[0].logprobs is None else [entry for part in parts for entry in part.logprobs or []]
    )
    text, ids = "".join(part.text for part in parts), [token for part in parts for token in part.token_ids]
    whole.outputs = [dataclasses.replace(parts[-1], text=text, token_ids=ids, logprobs=logprobs)]
    return whole


def assert_equal(one: RequestOutput, other: RequestOutput) -> None:
    """Log probabilities up to the rounding of differently shaped programs, the rest exactly."""
    plain: dict[str, Any] = {"logprobs": None, "cumulative_logprob": None}
    [ours], [theirs] = one.outputs, other.outputs
    assert dataclasses.replace(ours, **plain) == dataclasses.replace(theirs, **plain)
    for some, known in ((ours.logprobs, theirs.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
        assert (some is None) == (known is None)
        for entry, expected in zip(some or [], known or [], strict=True):
            assert (entry or {}).keys() == (expected or {}).keys()
            assert all(abs(entry[token].logprob - expected[token].logprob) < 1e-4 for token in entry or ())  # type: ignore[index]


def test_outputs_are_those_of_llm(llm: LLM, fresh: AsyncLLM) -> None:
    """All four run together, each in three ways: the last cumulative output, the sum of the deltas, the final
    output.
    """
    expected = llm.generate([p for p, _ in WORK], [s for _, s in WORK], use_tqdm=False)
    assert {output.outputs[0].finish_reason for output in expected} == {"stop", "length"}, (
        "the work lost its variety"
    )

    async def main() -> None:
        kinds = ("cumulative", "delta", "final")
        got = await asyncio.gather(
            *[collect(fresh, p, s, output_kind=kind) for kind in kinds for p, s in WORK]
        )
        for i, known in enumerate(expected):
            cumulative, delta, final = got[i], got[len(WORK) + i], got[2 * len(WORK) + i]
            assert len(final) == 1
            for output in (cumulative[-1], joined(delta), final[0]):
                assert_equal(output, known)
            for series in (cumulative, delta, final):
                assert [output.finished for output in series] == [False] * (len(series) - 1) + [True]
            sizes = [len(output.outputs[0].token_ids) for output in cumulative]
            assert sizes == sorted(set(sizes)), "outputs that were given away have grown"

    asyncio.run(main())


def test_a_slow_reader_gets_several_tokens_at_a_time() -> None:
    async def main() -> None:
        async with counting(CountingRunner(0.001)) as llm:
            deltas = []
            async for output in llm.generate(TEXT, LONG, output_kind="delta"):
                deltas.append(output)
                await asyncio.sleep(0.05)
            whole = joined(deltas).outputs[0]
            assert max(len(delta.outputs[0].token_ids) for delta in deltas) > 5
            assert len(whole.token_ids) > 150 and whole.text == llm.tokenizer.decode(whole.token_ids)

    asyncio.run(main())


def test_abort(fresh: AsyncLLM) -> None:
    async def main() -> None:
        outputs = []
        async for output in fresh.generate(TEXT, LONG, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 3:
                assert (
                    await fresh.abort("mine")
                    and not await fresh.abort("mine")
                    and not await fresh.abort("yours")
                )
        assert outputs[-1].finished and len(outputs) == 4 and outputs[-1].metrics.finished is not None
        assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("abort", None)
        assert not await fresh.abort("mine")
        handles = [fresh.submit(TEXT, LONG, request_id=name) for name in ("a", "b")]
        assert await fresh.abort(["a", "yours", "b"]) and not await fresh.abort(["a", "b"])
        assert all(handle.finished for handle in handles)
        for handle in handles:
            handle.close()
        await wait_until_idle(fresh)

    asyncio.run(main())


def test_an_id_may_be_used_again_at_once(llm: LLM, fresh: AsyncLLM) -> None:
    """Tokens dispatched for the id's previous request do not reach the next one."""
    prompt, params = WORK[0]
    expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs

    async def main() -> None:
        for _ in range(20):
            async with aclosing(fresh.generate([3, 4], LONG, request_id="same")) as outputs:
                await anext(outputs)
            assert (await collect(fresh, prompt, params, request_id="same"))[-1].outputs == expected

    asyncio.run(main())


def test_leaving_the_iteration_frees_pages(fresh: AsyncLLM) -> None:
    async def leaves(how: str) -> None:
        async for _ in fresh.generate(TEXT, LONG):
            if how == "break":
                break
            if how == "raise":
                raise KeyError(how)

    async def main() -> None:
        await leaves("break")
        with pytest.raises(KeyError):
            await leaves("raise")
        task = asyncio.create_task(leaves("never"))
        while not fresh.backend.engine.scheduler.registry.num_running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until_idle(fresh)

    asyncio.run(main())


def test_timeouts() -> None:
    async def main() -> None:
        async with counting(CountingRunner(0.005)) as llm:
            start = time.monotonic()
            now, soon, late = await asyncio.gather(
                *[collect(llm, TEXT, LONG, timeout=seconds) for seconds in (0, 0.2, 60.0)]
            )
            for outputs in (now, soon):
                assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == (
                    "abort",
                    "timeout",
                )
            assert 1 <= len(now) <= 3 and 3 < len(soon) < 100
            assert late[-1].outputs[0].finish_reason == "length" and time.monotonic() - start > 0.2
            await wait_until_idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize(
    "prompt, options, field",
    [
        ([], {}, "prompt"),
        (7, {}, "prompt"),
        ([400], {}, "prompt_token_ids"),
        ([1] * 192, {}, "prompt_token_ids"),
        (TEXT, {"sampling_params": 3}, "sampling_params"),
        (TEXT, {"sampling_params": SamplingParams(stop_token_ids=[400])}, "stop_token_ids"),
        (TEXT, {"output_kind": "some"}, "output_kind"),
        (TEXT, {"timeout": -1}, "timeout"),
        (TEXT, {"timeout": float("nan")}, "timeout"),
        (TEXT, {"timeout": "1"}, "timeout"),
        (TEXT, {"priority": 1.5}, "priority"),
        (TEXT, {"request_id": 5}, "request_id"),
        (TEXT, {"request_id": "taken"}, "request_id"),
    ],
)
def test_refused_before_it_is_queued(prompt: Any, options: dict[str, Any], field: str) -> None:
    async def main() -> None:
        llm = counting(CountingRunner(0.001))
        async with aclosing(llm.generate([1], LONG, request_id="taken")) as taken:
            await anext(taken)
            with pytest.raises(InvalidArgument) as refused:
                await collect(llm, prompt, **options)
            assert refused.value.field == field
            assert (
                list(llm._requests._handles) == ["taken"]
                and len(llm._requests._live._live) == 1
                and len(llm.backend.engine.scheduler.registry.by_id) == 1
            )
        await llm.close()
        assert_idle(llm)

    asyncio.run(main())


def test_500_requests_with_random_aborts_and_timeouts(fresh: AsyncLLM) -> None:
    rng = random.Random(0)
    ends: dict[str, int] = {}

    async def one(number: int) -> None:
        how = rng.choice(["finish", "finish", "abort", "timeout", "leave", "cancel"])
        prompt = [rng.randrange(300) for _ in range(rng.randint(1, 100))]
        n, temperature = rng.choice([(1, 0.0), (1, 1.0), (3, 1.0)])
        params = SamplingParams(
            n=n, max_tokens=rng.randint(1, 24), temperature=temperature, stop=rng.choice([[], ["e"]])
        )
        ended, seen, most = 0, 0, rng.randint(1, 10)
        name = str(number)
        await asyncio.sleep(rng.random() * 2)
        if how == "cancel":
            asyncio.get_running_loop().call_later(rng.random() / 20, asyncio.current_task().cancel)  # type: ignore[union-attr]
        timeout = rng.random() if how == "timeout" else None
        kind: OutputKind = rng.choice(["delta", "cumulative"])
        try:
            outputs = fresh.generate(prompt, params, request_id=name, timeout=timeout, output_kind=kind)
            async for output in outputs:
                assert not ended, "an output after the last one"
                ended, seen = ended + output.finished, seen + 1
                if seen == most and how == "abort":
                    await fresh.abort(name)
                if seen == most and how == "leave" and not ended:
                    how = "left"
                    break
        except asyncio.CancelledError:
            how = "cancelled"
        reason = str(output.outputs[0].finish_reason) if ended else how
        ends[reason] = ends.get(reason, 0) + 1
        assert ended or how in ("left", "cancelled")

    async def main() -> None:
        async with asyncio.timeout(120):
            await asyncio.gather(*[one(number) for number in range(500)])
            await wait_until_idle(fresh)

    before = fresh.backend.engine.compiles_since_start
    asyncio.run(main())
    assert sum(ends.values()) == 500 and {"stop", "length", "abort", "left", "cancelled"} <= set(ends), ends
    assert fresh.backend.engine.compiles_since_start == before


def test_closing_a_handle_ends_its_reader() -> None:
    async def run() -> list[RequestOutput]:
        output = RequestOutput(
            request_id="a", prompt=None, prompt_token_ids=[1], outputs=[CompletionOutput()]
        )
        handle = RequestHandle(output, "cumulative", lambda why: True, lambda handle: None, lambda: None)

        async def read() -> list[RequestOutput]:
            return [news async for news in handle]

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)  # it waits
        handle.close()
        return await asyncio.wait_for(reader, 60)

    assert asyncio.run(run()) == []
