"""n completions of one prompt: each equals that of a single request with its sample index, and together they
are one request."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine import LLM, AsyncLLM, CompletionOutput, InvalidArgument, RequestOutput, SamplingParams
from jengine.api.backend import EngineThread
from jengine.api.outputs import LiveOutputs, blank_copy, catch_up
from jengine.api.prompts import make_requests
from jengine.core.request import MAX_SAMPLES, Request
from jengine.core.updates import Ended, PromptScores, TokenLogprobs, TokenUpdate
from jengine.text.tokenizer import Tokenizer
from tests.engine.counting import CountingRunner, assert_idle, collect, counting
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, limit_pages
from tests.text.conftest import byte_level

TEXT = "The quick brown fox"
SAMPLED = {"n": 4, "seed": 3, "max_tokens": 24}
LONG: dict[str, Any] = {"n": 3, "seed": 3, "max_tokens": None}


@pytest.fixture(scope="module")
def llm(text_model: Path) -> LLM:
    with on_demand():
        return LLM(text_model, progress=False, **SMALL, max_model_len=192)


@pytest.fixture
def online(llm: LLM) -> Iterator[AsyncLLM]:
    """An AsyncLLM over the engine of `llm`, which is idle again afterwards."""
    online = AsyncLLM.over(EngineThread(llm.engine), llm.tokenizer)
    yield online
    asyncio.run(online.close())
    assert_idle(online)


def generate(llm: LLM, **params: Any) -> RequestOutput:
    return llm.generate(TEXT, SamplingParams(**params), use_tqdm=False)[0]


def alone(llm: LLM, index: int, **params: Any) -> list[int]:
    """The tokens of one sample, run without the others."""
    request = make_requests(llm.tokenizer, TEXT, SamplingParams(**params), "alone")[index]
    assert request.sample_index == index
    tokens = []
    llm.engine.add(request)
    while llm.engine.has_work:
        tokens += [update.token for update in llm.engine.step() if isinstance(update, TokenUpdate)]
    return tokens


def ends(output: RequestOutput) -> list[tuple[str | None, int | str | None]]:
    return [(completion.finish_reason, completion.stop_reason) for completion in output.outputs]


# Samples.

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "truncated": {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": -0.5},
    "bad_words": {"bad_words": ["ab", "c"], "allowed_token_ids": range(60, 80)},
    "choice": {"structured_outputs": {"choice": ["abcdefgh", "abx", "xyz"]}, "max_tokens": 6},
    "regex": {"structured_outputs": {"regex": "[a-d]{3,9}x"}},
    "stop tokens": {
        "stop_token_ids": list(range(70, 80)),
        "logit_bias": {i: 3.0 for i in range(70, 80)},
        "min_tokens": 2,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_what_its_sample_index_gives_alone(kind: str, llm: LLM) -> None:
    """Includes masks: each of n samples is at a different place in its grammar."""
    params = {
        **SAMPLED,
        **KINDS[kind],
        "allowed_token_ids": list(KINDS[kind].get("allowed_token_ids", ())) or None,
    }
    output = generate(llm, **params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3] and output.finished
    assert [completion.token_ids for completion in output.outputs] == [
        alone(llm, i, **params) for i in range(4)
    ]
    assert output.outputs[0] == generate(llm, **{**params, "n": 1}).outputs[0]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1


def test_they_all_differ_and_repeat(llm: LLM) -> None:
    params = {**SAMPLED, "ignore_eos": True}  # two that end at once would be alike
    output = generate(llm, **{**params, "n": MAX_SAMPLES})
    assert len({completion.text for completion in output.outputs}) == MAX_SAMPLES
    assert output.outputs == generate(llm, **{**params, "n": MAX_SAMPLES}).outputs
    assert [c.token_ids for c in output.outputs[:4]] == [c.token_ids for c in generate(llm, **params).outputs]


def test_beside_other_prompts(llm: LLM) -> None:
    """Results are in the order of the prompts, for any n of each, and prompts do not affect each other."""
    params = [SamplingParams(n=n, seed=n, max_tokens=10 + n) for n in (3, 1, 5, 2, 1)]
    prompts: list[Any] = [TEXT, [5] * 70, "The end", [7, 8], TEXT]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, p, output in zip(prompts, params, together, strict=True):
        assert (
            output.outputs == llm.generate(prompt, p, use_tqdm=False)[0].outputs
            and len(output.outputs) == p.n
        )
    assert len({output.request_id for output in together}) == 5
    assert llm.engine.compiles_since_start == 0


def test_without_a_seed_they_draw_one_together(llm: LLM) -> None:
    def seeds(n: int) -> list[int]:
        sequences = llm.engine.add(*make_requests(llm.tokenizer, TEXT, SamplingParams(n=n), "unseeded"))
        for sequence in sequences:
            llm.engine.end(sequence.request_id, "abort")
        return [sequence.seed for sequence in sequences]

    first, second = seeds(3), seeds(2)
    assert len({*first}) == len({*second}) == 1 and first[0] != second[0]
    assert len({completion.text for completion in generate(llm, n=4).outputs}) == 4


def test_a_prompt_is_scored_once(llm: LLM) -> None:
    one, several = (generate(llm, **{**SAMPLED, "n": n, "prompt_logprobs": 2, "logprobs": 1}) for n in (1, 4))
    assert one.prompt_logprobs is not None and several.prompt_logprobs is not None
    assert len(several.prompt_logprobs) == len(several.prompt_token_ids)
    for expected, got in zip(one.prompt_logprobs[1:], several.prompt_logprobs[1:], strict=True):
        assert expected is not None and got is not None and expected.keys() == got.keys()
        assert all(abs(expected[token].logprob - got[token].logprob) < 1e-4 for token in got)
    assert all(len(c.logprobs or ()) == 24 and c.cumulative_logprob is not None for c in several.outputs)
    requests = make_requests(llm.tokenizer, TEXT, SamplingParams(n=4, prompt_logprobs=2), "0")
    assert [request.params.prompt_logprobs for request in requests] == [2, None, None, None]


def test_a_stop_string_ends_one_of_them(llm: LLM) -> None:
    plain = generate(llm, **SAMPLED).outputs
    text = plain[2].text
    stop = next(
        s
        for s in (text[i : i + 3] for i in range(3, 20))
        if "\ufffd" not in s and all(s not in c.text for c in plain if c.index != 2)
    )
    output = generate(llm, **SAMPLED, stop=stop)
    assert ends(output) == [("length", None), ("length", None), ("stop", stop), ("length", None)]
    assert output.outputs[2].text == text[: text.index(stop)] and len(output.outputs[2].token_ids) < 24
    assert [c for c in output.outputs if c.index != 2] == [c for c in plain if c.index != 2]
    assert not llm.engine.has_work


# Streams, aborts, timeouts.


def test_a_stream_of_several(llm: LLM) -> None:
    whole, sizes, last = generate(llm, **SAMPLED), [], None
    for output in llm.stream(TEXT, SamplingParams(**SAMPLED)):
        assert last is None or output is last
        last = output
        sizes.append([len(completion.token_ids) for completion in output.outputs])
        assert output.finished == (sizes[-1] == [24] * 4)
    assert last is not None and last.outputs == whole.outputs
    assert all(sum(before) < sum(after) for before, after in itertools.pairwise(sizes)) and len(sizes) > 2


def test_closing_a_stream_ends_all(llm: LLM) -> None:
    stream = llm.stream(TEXT, SamplingParams(**LONG))
    seen = [next(stream) for _ in range(5)][-1]
    assert llm.engine.scheduler.registry.num_running == 3
    stream.close()
    assert seen.finished and ends(seen) == [("abort", None)] * 3
    assert not llm.engine.has_work and llm.engine.scheduler.blocks.owned == 0


def test_online_in_three_ways(llm: LLM, online: AsyncLLM) -> None:
    params = SamplingParams(**SAMPLED, logprobs=1, stop=["a", "e"], prompt_logprobs=0)
    expected = llm.generate(TEXT, params, use_tqdm=False)[0]

    async def main() -> None:
        kinds: Any = ("cumulative", "delta", "final")
        cumulative, delta, final = await asyncio.gather(
            *[collect(online, TEXT, params, output_kind=kind) for kind in kinds]
        )
        assert len(final) == 1
        for series in (cumulative, delta, final):
            assert [output.finished for output in series] == [False] * (len(series) - 1) + [True]
            assert all(
                [completion.index for completion in output.outputs] == [0, 1, 2, 3] for output in series
            )
        assert sum(output.prompt_logprobs is not None for output in delta) == 1
        for i, known in enumerate(expected.outputs):
            parts = [output.outputs[i] for output in delta]
            for got in (cumulative[-1].outputs[i], final[0].outputs[i]):
                assert (got.text, got.token_ids, got.finish_reason, got.stop_reason) == (
                    *(known.text, known.token_ids, known.finish_reason),
                    known.stop_reason,
                )
            assert "".join(part.text for part in parts) == known.text
            assert [token for part in parts for token in part.token_ids] == known.token_ids
            assert sum(len(part.logprobs or ()) for part in parts) == len(known.token_ids)

    asyncio.run(main())


def test_an_abort_ends_those_that_have_not_ended(llm: LLM, online: AsyncLLM) -> None:
    """A sample that ended with its stop string keeps its output."""
    plain = generate(llm, **LONG).outputs
    stop = next(
        token
        for token in plain[1].token_ids[1:]
        if not any(token in c.token_ids for c in plain if c.index != 1)
    )
    at = plain[1].token_ids.index(stop)

    async def main() -> None:
        outputs = []
        async for output in online.generate(
            TEXT, SamplingParams(**LONG, stop_token_ids=[stop]), request_id="mine"
        ):
            outputs.append(output)
            if output.outputs[1].finish_reason is not None and not output.finished:
                await online.abort("mine")
        assert (
            ends(outputs[-1]) == [("abort", None), ("stop", stop), ("abort", None)] and outputs[-1].finished
        )
        assert outputs[-1].outputs[1].token_ids == plain[1].token_ids[: at + 1]
        assert not await online.abort("mine")
        async with aclosing(online.generate(TEXT, SamplingParams(**LONG), request_id="mine")) as left:
            await anext(left)
        assert (await collect(online, TEXT, SamplingParams(n=2, max_tokens=3), request_id="mine"))[
            -1
        ].finished

    asyncio.run(main())


def test_a_timeout_ends_all() -> None:
    async def main() -> None:
        async with counting(CountingRunner(0.005)) as llm:
            outputs = await collect(llm, TEXT, SamplingParams(**LONG, ignore_eos=True), timeout=0.2)
            assert ends(outputs[-1]) == [("abort", "timeout")] * 3 and len(outputs) > 3
            while llm.backend.engine.has_work:
                await asyncio.sleep(0.005)
            assert llm.backend.engine.scheduler.blocks.owned == 0

    asyncio.run(main())


# Admission.


def test_each_needs_pages_of_its_own(text_model: Path, llm: LLM) -> None:
    """Each fits alone and all together do not: they wait and are preempted, and the tokens are the same."""
    with on_demand():
        tight = LLM(text_model, progress=False, **SMALL, max_model_len=192)
    limit_pages(tight.engine, 12)
    tight._shared.limits = tight.engine.limits
    params = SamplingParams(n=6, seed=9, max_tokens=60)
    output = tight.generate(TEXT, params, use_tqdm=False)[0]
    assert output.outputs == llm.generate(TEXT, params, use_tqdm=False)[0].outputs
    assert output.metrics.preemptions == tight.stats["preemptions"] > 0
    metrics = output.metrics
    assert metrics.first_token is not None and metrics.finished is not None
    assert (
        metrics.scheduled is not None
        and metrics.arrival < metrics.scheduled < metrics.first_token < metrics.finished
    )
    with pytest.raises(InvalidArgument, match="need 12 pages of 16 tokens; the cache has 11"):
        tight.generate(TEXT, SamplingParams(n=2, max_tokens=None), use_tqdm=False)
    assert not tight.engine.has_work


def test_all_or_none_are_queued(llm: LLM) -> None:
    requests = make_requests(llm.tokenizer, TEXT, SamplingParams(n=4), "mine")
    llm.engine.add(requests[2])
    with pytest.raises(InvalidArgument, match="not finished yet"):
        llm.engine.add(*requests)
    assert llm.engine.scheduler.registry.num_waiting == 1
    assert llm.engine.end("mine/2", "abort") and not llm.engine.has_work


@pytest.mark.parametrize("temperature", [0, 0.0])
def test_greedy_ones_would_be_the_same(temperature: float) -> None:
    with pytest.raises(InvalidArgument) as refused:
        SamplingParams(n=2, temperature=temperature)
    assert refused.value.field == "n" and refused.value.value == 2
    assert SamplingParams(n=1, temperature=temperature).greedy


# Outputs without an engine.

TOKENIZER = Tokenizer(byte_level())


def opened(n: int, **params: Any) -> tuple[LiveOutputs, RequestOutput, list[Request]]:
    requests = make_requests(TOKENIZER, [5], SamplingParams(n=n, **params), "7")
    live = LiveOutputs(TOKENIZER)
    return live, live.open(requests), requests


@given(st.permutations([0] * 4 + [1] * 3 + [2] * 5))
def test_completions_grow_in_any_order(order: list[int]) -> None:
    """Each has its own tokens, reason and preemptions; the output ends with the last of them."""
    live, output, requests = opened(3)
    lengths, given = (4, 3, 5), [0, 0, 0]
    for i in order:
        assert not output.finished and output.metrics.finished is None
        given[i] += 1
        last = given[i] == lengths[i]
        update = TokenUpdate(
            requests[i].request_id, 100 * i + given[i], "length" if last else None, preemptions=i * given[i]
        )
        assert live.take([update]) == [output] and output.metrics.first_token is not None
    assert [c.token_ids for c in output.outputs] == [
        [100 * i + 1 + j for j in range(length)] for i, length in enumerate(lengths)
    ]
    assert output.finished and output.metrics.finished is not None and output.metrics.preemptions == 3 + 10
    assert (
        live.take([TokenUpdate(request.request_id, 1) for request in requests]) == []
        and live.abort("7") is None
        and live.ended == []
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_cached_tokens_are_the_first_completions(order: tuple[int, int]) -> None:
    live, output, requests = opened(2)
    copy = blank_copy(output)
    assert output.num_cached_tokens is None
    for i in order:
        live.take([TokenUpdate(requests[i].request_id, 70, cached=16 + i)])
        assert output.num_cached_tokens == (16 if 0 in order[: order.index(i) + 1] else 17)
    catch_up(copy, output)
    assert copy.num_cached_tokens == 16


@pytest.mark.parametrize("lazy", [False, True])
@given(cuts=st.lists(st.sets(st.integers(2, 11)), min_size=1, max_size=4), kept=st.integers(0, 3))
def test_a_prompt_that_is_scored_again_in_other_tiles(lazy: bool, cuts: list[set[int]], kept: int) -> None:
    """Each token is scored once, whatever the tiles of a run that a preemption ends, and of the next one."""
    requests = make_requests(TOKENIZER, [*range(12)], SamplingParams(prompt_logprobs=0), "7")
    live = LiveOutputs(TOKENIZER, lazy=lazy)
    output = live.open(requests)
    for run, ends in enumerate(cuts, 1):
        tiles = [*itertools.pairwise([1, *sorted(ends), 12])]
        for start, end in tiles if run == len(cuts) else tiles[:kept]:
            scores = [TokenLogprobs(-float(token), 1, []) for token in range(start, end)]
            live.take([PromptScores("7", start, [*range(start, end)], scores)])
    first, *others = output.prompt_logprobs or ()
    assert first is None and [[*entry] for entry in others if entry] == [[token] for token in range(1, 12)]
    assert [entry[token].logprob for token, entry in enumerate(others, 1) if entry] == [*range(-1, -12, -1)]


def test_what_comes_for_one_that_has_ended_is_dropped() -> None:
    live, output, _ = opened(2, stop="b")
    assert live.take([TokenUpdate("7", 66), TokenUpdate("7", 67), TokenUpdate("7", 68)]) == [output]
    assert (
        live.take([PromptScores("7", 1, [5], [TokenLogprobs(-1.0, 1, [])])]) == []
        and output.prompt_logprobs is None
    )
    assert output.outputs[0] == CompletionOutput(
        text="a", token_ids=[66, 67], finish_reason="stop", stop_reason="b", weights_versions=[(0, 0)]
    )
    assert live.abort("7", "why") is output and ends(output) == [("stop", "b"), ("abort", "why")]
    assert live.ended == [Ended("7", "stop", "b"), Ended("7/1", "abort", "why")] and live.abort("7") is None
