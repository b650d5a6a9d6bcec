"""Streams two requests at the same time from an asynchronous engine."""

import asyncio

from jengine import SamplingParams
from jengine.engine.arg_utils import AsyncEngineArgs
from jengine.outputs import RequestOutput
from jengine.sampling_params import RequestOutputKind
from jengine.utils import random_uuid
from jengine.v1.engine.async_llm import AsyncLLM


async def stream(engine: AsyncLLM, prompt: str) -> str:
    sampling_params = SamplingParams(max_tokens=8, temperature=0.0, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(
        request_id=random_uuid(), prompt=prompt, sampling_params=sampling_params
    ):
        for completion in output.outputs:
            text += completion.text
        if output.finished:
            break
    return text


async def whole(engine: AsyncLLM, prompt: str) -> str:
    final: RequestOutput | None = None
    sampling_params = SamplingParams(max_tokens=8, temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY)
    async for output in engine.generate(prompt, sampling_params, "whole"):
        assert final is None
        final = output
    return final.outputs[0].text


async def main() -> None:
    args = AsyncEngineArgs(
        model="demo",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        enforce_eager=False,
        disable_log_requests=True,
    )
    engine = AsyncLLM.from_engine_args(args)
    try:
        prompts = ["def f(x):", "import sys"]
        texts = await asyncio.gather(*(stream(engine, prompt) for prompt in prompts))
        print("Streamed:", all(texts), texts[0] == await whole(engine, prompts[0]))
    finally:
        engine.shutdown()


asyncio.run(main())
