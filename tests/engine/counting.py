"""An AsyncLLM over a runner without a model: nothing is compiled, and failures can be requested."""

from __future__ import annotations

import time
from typing import Any

from jengine import AsyncLLM, RequestOutput, SamplingParams
from jengine.api.backend import EngineThread
from jengine.engine.loop.engine import Engine
from jengine.execution.runner import InFlight, StepResult
from jengine.models.config import ModelConfig
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import ProgramTable
from jengine.text.tokenizer import Tokenizer
from tests.schedulers import make_scheduler
from tests.text.conftest import byte_level

TEXT = "The quick brown fox"
LONG = SamplingParams(max_tokens=None, ignore_eos=True)


class CountingRunner:
    """A runner without a model: the tokens of a sampler row are 100, 101, ... Can fail at a given step."""

    def __init__(self, seconds: float = 0.0, fail_at: int | None = None) -> None:
        self.seconds, self.fail_at, self.steps = seconds, fail_at, 0
        self.on_host = True

    def memory_parts(self) -> dict[str, int]:
        return {}  # asked by a profile of this process

    def dispatch(self, plan: StepPlan) -> InFlight:
        return InFlight(plan, None)

    def read(self, step: InFlight) -> StepResult:
        time.sleep(self.seconds)
        if self.steps == self.fail_at:
            raise FloatingPointError("the device is on fire")
        self.steps += 1
        return StepResult([[100 + self.steps % 50]] * len(step.plan.samples))


def counting(runner: CountingRunner, tokenizer: Tokenizer | None = None) -> AsyncLLM:
    """An AsyncLLM that is known to work without compiling anything."""
    shape = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
    }
    config = ModelConfig(family="llama", vocab_size=400, max_position=200, **shape)
    table = ProgramTable.build(max_num_seqs=8, max_num_batched_tokens=136, tile_size=64)
    limits = {
        "page_size": 16,
        "num_pages": 120,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 136,
        "max_model_len": 192,
    }
    scheduler = make_scheduler(table, **limits)
    return AsyncLLM.over(
        EngineThread(Engine(config, runner, scheduler)), tokenizer or Tokenizer(byte_level())
    )


async def collect(
    llm: AsyncLLM, prompt: Any, sampling_params: SamplingParams | None = None, **options: Any
) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, sampling_params, **options)]


def assert_idle(llm: AsyncLLM) -> None:
    assert (
        not llm.backend._thread.is_alive() and not llm.backend.engine.has_work and not llm._requests._handles
    )
    llm.backend.engine.scheduler.check_integrity()
    assert llm.backend.engine.scheduler.blocks.owned == 0
