"""One of several processes that share a model: python -m tests.parallel.processes FOLDER PORT PROCESS ACT
[OPTIONS], with a JSON object of options.

ACT answers: process 0 prints a JSON line of what `answers` returns and ends. ACT wait: process 0 starts
requests that are never done, prints a line once each has a token, and a JSON line of how they ended. ACT
widen:FILE: process 1 compiles nothing in the background until there is such a file, which process 0 makes
once it has all programs itself; it prints a JSON line of what `widened` returns. ACT
experts:N,VARIANT: one of N processes that share experts; process 0 prints a JSON line of what `greedy`
returns.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jengine import LLM, AsyncLLM, EngineConfig, EngineDead, SamplingParams, follow
from jengine.execution import programs
from jengine.execution.kinds import DeviceCall, call_kind
from jengine.scheduling.costs.step_costs import SwapCosts
from jengine.spi import start_engine
from tests.engine.running import SMALL, limit_pages, run
from tests.golden.weights import Golden, max_model_len

PROMPTS = [[1, 2, 3], list(range(4, 90)), [7] * 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, detokenize=False)
SAMPLES = SamplingParams(n=3, seed=5, max_tokens=24, ignore_eos=True, detokenize=False)
LONG = SamplingParams(temperature=0.0, max_tokens=170, ignore_eos=True, detokenize=False)
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 192, "max_num_seqs": 8, "max_num_batched_tokens": 72,
    "page_size": 16, "swap_space": 0.05,
}  # fmt: skip


def answers(llm: LLM) -> tuple[list[list[int]], int, Counter[str], bool]:
    """Outputs, of which the later ones share pages, and the last begin with pages from the host; prompt
    tokens that were found in the cache, and the calls made before that; whether pages went to the host and
    came back.
    """
    engine: Any = llm.engine
    calls: Counter[str] = Counter()
    execute = engine.runner.worker.execute

    def counting(call: DeviceCall) -> Any:
        calls[call_kind(call.key).name] += 1
        return execute(call)

    engine.runner.worker.execute = counting
    first = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    turns = [[*out.prompt_token_ids, *out.outputs[0].token_ids, 5, 6] for out in first]
    outputs = [
        *first,
        *llm.generate(turns, GREEDY, use_tqdm=False),
        *llm.generate(PROMPTS, SAMPLES, use_tqdm=False),
    ]
    found = engine.scheduler.prefixes.hits, Counter(calls)
    limit_pages(engine, 9)  # one request at a time
    engine.scheduler.predictor.costs.swaps = SwapCosts(0.0, 0.0, 0.0)
    outputs += [
        llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        for _ in range(3)
        for prompt in (PROMPTS[1], [*range(90, 4, -1)])
    ]
    return (
        [one.token_ids for out in outputs for one in out.outputs],
        *found,
        min(calls["spill"], calls["stage"], calls["fill"]) > 0,
    )


async def wait_for_ever(model: str, options: dict[str, Any]) -> None:
    async with AsyncLLM(model, progress=False, **options) as llm:
        waiting = set(range(len(PROMPTS)))

        async def one(index: int) -> tuple[str, float]:
            try:
                while True:
                    async for _ in llm.generate(PROMPTS[index], LONG):
                        if waiting:
                            waiting.discard(index)
                            if not waiting:
                                print("running", flush=True)
            except EngineDead as error:
                return str(error), time.time()

        print(json.dumps(await asyncio.gather(*map(one, range(len(PROMPTS))))), flush=True)


def widened(llm: LLM, file: Path) -> list[tuple[int, int, int, bool]]:
    """Ready programs, all programs, the largest number of rows, and whether the wait succeeded: before and
    after process 1 compiles.
    """
    engine: Any = llm.engine
    found = []
    for _ in range(2):
        complete = engine.wait_until_compiled(300.0)
        while file.exists() and engine.load.programs_ready < engine.load.programs:
            time.sleep(0.01)
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        found.append(
            (
                engine.load.programs_ready,
                engine.load.programs,
                engine.scheduler.predictor.ready.max_rows,
                complete,
            )
        )
        file.touch()
    return found


def hold_back(file: Path) -> None:
    """Compilations in the background, until there is such a file."""
    compile_all = programs.compile_all

    def held_back(*args: Any, background: bool = False, **options: Any) -> Iterator[Any]:
        while background and not file.exists():
            time.sleep(0.01)
        yield from compile_all(*args, background=background, **options)

    programs.compile_all = held_back


def greedy(config: EngineConfig, variant: str) -> list[list[int]]:
    """The tokens that follow a variant's prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    engine, _ = start_engine(config, progress=False)
    cases = Golden.read(variant).cases
    return [answer.tokens for answer in run(engine, [(case.prompt.tolist(), params) for case in cases])]


def main(model: str, port: str, process: str, act: str, more: str = "{}") -> None:
    shared = {
        "tensor_parallel_size": 4,
        "coordinator": f"127.0.0.1:{port}",
        "num_processes": 2,
        "process_id": int(process),
    }
    options = {**OPTIONS, **shared, **json.loads(more)}
    act, _, file = act.partition(":")
    if act == "experts":
        count, variant = file.split(",")
        how = {"num_processes": int(count), "enable_expert_parallel": True, "dtype": "float32"}
        options = {**SMALL, **shared, **how, "max_model_len": max_model_len(variant)}
    if act == "widen":
        options |= {"max_num_seqs": 16, "max_num_batched_tokens": 80, "cache_dir": str(Path(file).parent)}
        if options["process_id"]:
            hold_back(Path(file))
    if options["process_id"]:
        follow(EngineConfig.of(model, options), progress=False)
    elif act == "experts":
        print(json.dumps(greedy(EngineConfig.of(model, options), variant)), flush=True)
    elif act == "answers":
        llm = LLM(model, progress=False, **options)
        print(json.dumps(answers(llm)), flush=True)
    elif act == "widen":
        print(json.dumps(widened(LLM(model, progress=False, **options), Path(file))), flush=True)
    else:
        asyncio.run(wait_for_ever(model, options))


if __name__ == "__main__":
    main(*sys.argv[1:])
