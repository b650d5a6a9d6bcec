"""Prompts computed in one process, answered by another: tokens of one engine, even if a process dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jengine import (
    LLM,
    AsyncLLM,
    EngineConfig,
    EngineDead,
    InvalidArgument,
    RequestOutput,
    SamplingParams,
    Tokenizer,
)
from jengine.serving.config import ServerConfig
from jengine.serving.processes.engine_fleet import EngineFleet, maker
from jengine.serving.processes.engine_process import EngineProcess
from jengine.spi import BackOff
from tests.engine.running import SMALL
from tests.serving.children import LONG, MOCK
from tests.serving.leaks import nothing_leaks, wait_until

FEW = {"max_num_seqs": 4, "max_num_batched_tokens": 68, "speculative_config": "none"}  # programs
OPTIONS: dict[str, Any] = {**SMALL, **FEW, "max_model_len": 192, "swap_space": 0.05, "dtype": "float32"}
SHARED = "The quick brown fox jumps over the lazy dog. " * 2
PROMPTS = [
    *[SHARED + end for end in ("It barks.", "Then it sleeps, and so does the fox.")],
    "Short.",
    "Another beginning, with more than a page of text in it.",
]
WORK = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=1.0, seed=11, max_tokens=24),
    SamplingParams(n=3, seed=5, max_tokens=12, repetition_penalty=1.2, stop="e"),
]


def shown(output: RequestOutput) -> list[object]:
    return [(c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]


DECODE, PREFILL = 0, 1  # indices


def kill(engine: EngineFleet, index: int) -> None:
    """Ends a process, if it has not ended."""
    pid = engine.processes[index].pid
    assert pid
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def ask(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    return [one async for one in llm.generate(prompt, params, output_kind="final")][-1]


@pytest.fixture(scope="module")
def engine_of(text_model: Path) -> Any:
    """A function that makes an engine that is not started; the second one loads the first one's programs."""
    config = EngineConfig.of(str(text_model), OPTIONS)

    def make(**server: Any) -> EngineFleet:
        options = ServerConfig(prefill_engines=1, watchdog_seconds=0.0, **server)
        engine = maker(options, config)(None)
        assert isinstance(engine, EngineFleet)
        engine.back_off = partial(BackOff, first=0.05)
        return engine

    return make


def test_tokens_are_those_of_one_engine_also_if_the_other_is_killed(text_model: Path, engine_of: Any) -> None:
    llm = LLM(text_model, progress=False, num_scheduler_steps=1, **OPTIONS)  # programs as in a server
    assert llm.wait_until_compiled()
    work = [(prompt, params) for prompt in PROMPTS for params in WORK]
    expected = [shown(llm.generate(*one, use_tqdm=False)[0]) for one in work]
    tokenizer = Tokenizer.load(text_model)

    async def main(engine: EngineFleet) -> None:
        async with AsyncLLM.over(engine.backend, tokenizer) as llm:
            got = await asyncio.gather(*[ask(llm, *one) for one in work])
            assert [shown(one) for one in got] == expected
            store = engine.processes[DECODE].load.store
            assert store is not None and store.hits > 0 and store.failures == store.late == 0, store
            sent = engine.processes[PREFILL].load.store
            assert sent is not None and sent.kept > 0 and sent.dropped == sent.failures == 0
            assert sum(one.num_cached_tokens or 0 for one in got) > 0
            # the prefill engine dies while it has prompts
            later = [asyncio.create_task(ask(llm, f"{i} {SHARED}", WORK[0])) for i in range(6)]
            await asyncio.sleep(0)
            kill(engine, PREFILL)
            assert [one.outputs[0].finish_reason for one in await asyncio.gather(*later)] == ["length"] * 6
            again = await asyncio.gather(*[ask(llm, *one) for one in work[:4]])
            assert [shown(one) for one in again] == expected[:4], "without it"
            await asyncio.to_thread(wait_until, lambda: llm.load.running == llm.load.waiting == 0)
            assert llm.load.free_pages == llm.load.pages, "nothing is owned"

    with nothing_leaks():
        engine = engine_of()
        engine.start()
        asyncio.run(main(engine))
        engine.quit()


def mocks() -> EngineFleet:
    options = {"seconds": 0.003, "max_num_seqs": 4}
    return EngineFleet(
        lambda index, on_end: EngineProcess(MOCK, options, on_end),
        decode=1,
        prefill=1,
        back_off=partial(BackOff, first=0.02),
    )


def test_a_lost_prefill_engine_is_replaced_and_the_whole_ends_with_the_other(text_model: Path) -> None:
    tokenizer, eight = Tokenizer.load(text_model), SamplingParams(max_tokens=8, ignore_eos=True)

    async def main(engine: EngineFleet) -> None:
        async with AsyncLLM.over(engine.backend, tokenizer) as llm:
            for number in range(2):
                answer = await ask(llm, {"prompt_token_ids": [number, *range(2, 60)]}, eight)
                assert len(answer.outputs[0].token_ids) == 8
                assert engine.processes[PREFILL].generated == 1, (
                    "one token for the prompt, which no client gets"
                )
                kill(engine, PREFILL)
                await asyncio.to_thread(
                    wait_until, lambda number=number: engine.backend.restarts == number + 1
                )
            assert engine.backend.generated == 16 and len(engine.processes) == 2
            last = asyncio.create_task(ask(llm, {"prompt_token_ids": [9]}, LONG))
            await asyncio.to_thread(wait_until, lambda: engine.processes[DECODE].load.running == 1)
            kill(engine, DECODE)
            with pytest.raises(EngineDead):
                await last

    with nothing_leaks():
        engine = mocks()
        engine.start()
        asyncio.run(main(engine))
        engine.quit()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_once_whoever_is_killed_when(text_model: Path, seed: int) -> None:
    """Mocks, of which one or both are killed at some moment."""
    draw, tokenizer = random.Random(seed), Tokenizer.load(text_model)
    killed = draw.choice((["prefill"], ["decode"], ["prefill", "decode"], ["decode", "prefill"]))

    async def main(engine: EngineFleet) -> None:
        async with AsyncLLM.over(engine.backend, tokenizer) as llm:
            ends = list[Any]()

            async def one(number: int) -> None:
                await asyncio.sleep(draw.uniform(0.0, 0.2))
                try:
                    prompt = {"prompt_token_ids": [number, *range(2, 60)]}
                    ends.append(await ask(llm, prompt, SamplingParams(max_tokens=8, ignore_eos=True)))
                except EngineDead as dead:
                    ends.append(dead)

            asked = [asyncio.create_task(one(number)) for number in range(16)]
            for name in killed:
                await asyncio.sleep(draw.uniform(0.0, 0.15))
                kill(engine, PREFILL if name == "prefill" else DECODE)
            await asyncio.gather(*asked)
            assert len(ends) == 16
            answered = [end for end in ends if isinstance(end, RequestOutput)]
            assert all(end.outputs[0].finish_reason == "length" for end in answered)
            if killed == ["prefill"]:
                assert len(answered) == 16 and all(len(end.outputs[0].token_ids) == 8 for end in answered)

    with nothing_leaks():
        engine = mocks()
        engine.start()
        asyncio.run(main(engine))
        engine.quit()


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        ({}, {"swap_space": 0.0}, "swap_space=0.0: must be above 0 with prefill_engines"),
        ({}, {"enable_lora": True}, "prefill_engines=1: must be 0 with enable_lora"),
        (
            {},
            {"kv_transfer_config": {"kv_connector": "disk", "kv_connector_extra_config": {"root_dir": "x"}}},
            "kv_transfer_config=.* must be None with prefill_engines",
        ),
        (
            {"prefill_engines": 0},
            {"data_parallel_size": 2, "kv_transfer_config": {"kv_connector": "sockets"}},
            "data_parallel_size=2: must be 1 with kv_connector=sockets",
        ),
    ],
)
def test_what_does_not_go_together(server: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        maker(
            ServerConfig(**{"prefill_engines": 1, **server}),
            EngineConfig.of("demo", {"swap_space": 0.1, **options}),
        )
