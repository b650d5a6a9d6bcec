"""A model in an engine process: its answers equal LLM's."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jengine import LLM, EngineConfig, RequestOutput, SamplingParams, StructuredOutputs
from jengine.serving.config import ServerConfig
from jengine.serving.processes.engine_fleet import maker
from jengine.serving.processes.engine_process import EngineProcess
from jengine.serving.processes.supervisor import Supervisor
from jengine.spi import BackOff
from tests.engine.running import SMALL
from tests.serving.leaks import nothing_leaks

PROMPT = "The quick brown fox"
PATIENCE = 120.0  # seconds until an engine is replaced, on a busy machine
OPTIONS = {**SMALL, "max_model_len": 192}
WORK = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, prompt_logprobs=1),
    SamplingParams(n=3, seed=5, max_tokens=30, repetition_penalty=1.2, stop="e"),
    SamplingParams(seed=6, max_tokens=60, structured_outputs=StructuredOutputs(regex="[a-f]{5}-[0-9]{3}")),
    SamplingParams(temperature=0.0, max_tokens=20, bad_words=["e", "qu"], logit_bias={40: 5.0}),
    SamplingParams(temperature=0.0, max_tokens=20, allowed_token_ids=[50, 60, 70]),
]


def shown(output: RequestOutput) -> list[object]:
    """All but log probabilities, which differ by the rounding of differently shaped programs."""
    return [(c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]


def test_answers_are_those_of_llm(text_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(text_model, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 7}')
    llm = LLM(folder, progress=False, num_scheduler_steps=1, **OPTIONS)  # programs as in a server
    assert llm.wait_until_compiled()
    expected = [llm.generate(PROMPT, params, use_tqdm=False)[0] for params in WORK]
    config = EngineConfig(model=str(folder), **OPTIONS)
    supervisor = Supervisor("tiny", lambda on_end: EngineProcess.of(config, on_end))

    async def ask(params: SamplingParams) -> RequestOutput:
        return [output async for output in supervisor.llm.generate(PROMPT, params, output_kind="final")][-1]

    async def main() -> list[RequestOutput]:
        await supervisor.start()
        try:
            got = await asyncio.gather(*map(ask, WORK))
            process = supervisor.llm.backend
            assert isinstance(process, EngineProcess)
            assert (process.info.programs_compiled, supervisor.llm.load.compiles_since_start) == (0, 0)
            assert supervisor.llm.get_default_sampling_params() == SamplingParams(
                temperature=0.0, max_tokens=7
            )
            assert process.info.longest_step > 0, "the watchdog goes by it"
            assert (process.info.kernels, process.info.advice) == (llm.started.kernels, llm.started.advice)
            assert (supervisor.info.limits, supervisor.info.dtype) == (llm.engine.limits, llm.started.dtype)
            trace = await supervisor.llm.trace()
            assert len(trace.steps) > 30 and len(trace.requests) == sum(params.n for params in WORK)
            assert any(step.mask for step in trace.steps) and any(step.text for step in trace.steps)
            # the child tells them once it is idle
            while sum(supervisor.totals.steps.values()) < len(trace.steps):
                await asyncio.sleep(0.01)
            assert supervisor.totals.seconds["schedule"] > 0.0 and supervisor.totals.resident > 1 << 20
            return got
        finally:
            await supervisor.close()

    with nothing_leaks():
        got = asyncio.run(main())
    assert [shown(output) for output in got] == [shown(output) for output in expected]
    assert re.fullmatch("[a-f]{5}-[0-9]{3}", got[3].outputs[0].text)
    assert len({completion.text for completion in got[2].outputs}) == 3
    for one, other in zip(
        got[1].outputs[0].logprobs or [], expected[1].outputs[0].logprobs or [], strict=True
    ):
        assert one.keys() == other.keys() and all(
            abs(one[token].logprob - other[token].logprob) < 1e-4 for token in one
        )


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_in_the_place_of_another_has_its_weights(
    replicas: int, text_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If they are gone, requests wait for new ones: they do not get the weights of the start."""
    new = load_file(text_model / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in ("first", "second"):
        new = {
            key: array + 0.5 * array.std() * rng.standard_normal(array.shape, np.float32)
            for key, array in new.items()
        }
        (tmp_path / name).mkdir()
        save_file(new, tmp_path / name / "model.safetensors")
    config = EngineConfig(model=str(text_model), **OPTIONS, weight_updates=True, data_parallel_size=replicas)
    supervisor = Supervisor("tiny", maker(ServerConfig(), config), back_off=BackOff(first=0.01))

    async def ask() -> tuple[list[int], object]:
        [output] = [each async for each in supervisor.llm.generate(PROMPT, WORK[0], output_kind="final")]
        return output.outputs[0].token_ids, output.outputs[0].weights_versions

    async def replaced() -> None:
        restarts = supervisor.restarts
        os.kill(supervisor.pid or 0, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            while supervisor.restarts == restarts:
                await asyncio.sleep(0.01)

    async def main() -> None:
        await supervisor.start()
        try:
            before = await ask()
            assert await supervisor.llm.update_weights(tmp_path / "first", 5) == 5
            first = await ask()
            assert first[0] != before[0] and first[1] == [(0, 5)]
            await replaced()
            assert await asyncio.gather(*(ask() for _ in range(3 * replicas))) == [first] * 3 * replicas
            shutil.rmtree(tmp_path / "first")
            await replaced()
            waiting = [asyncio.create_task(ask()) for _ in range(3 * replicas)]
            assert await supervisor.llm.is_paused(), "the new one"
            assert "requests may wait: LoadWeights(folder=" in caplog.text
            assert await supervisor.llm.update_weights(tmp_path / "second", 6) == 6
            second = await ask()
            assert second[0] not in (before[0], first[0]) and second[1] == [(0, 6)]
            answers = await asyncio.gather(*waiting)
            assert all(answer == second for answer in answers if answer[1] == [(0, 6)])
            assert replicas > 1 or answers == [second] * 3
        finally:
            await supervisor.close()

    with nothing_leaks():
        asyncio.run(main())
