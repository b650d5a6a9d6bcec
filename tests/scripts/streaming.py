"""Streams two requests at the same time from an asynchronous engine."""

import asyncio
import uuid

from jengine import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from jengine.sampling_params import RequestOutputKind


async def stream(engine: AsyncLLMEngine, prompt: str) -> str:
    sampling_params = SamplingParams(max_tokens=8, temperature=0.0, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(prompt, sampling_params, str(uuid.uuid4())):
        for completion in output.outputs:
            text += completion.text
        if output.finished:
            break
    return text


async def whole(engine: AsyncLLMEngine, prompt: str) -> str:
    final = None
    async for output in engine.generate(
        request_id="whole", prompt=prompt, sampling_params=SamplingParams(max_tokens=8, temperature=0.0)
    ):
        final = output
    return final.outputs[0].text


async def main() -> None:
    args = AsyncEngineArgs(
        model="demo", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=128, enforce_eager=False
    )
    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        prompts = ["def f(x):", "import sys"]
        texts = await asyncio.gather(*(stream(engine, prompt) for prompt in prompts))
        print("Streamed:", all(texts), texts[0] == await whole(engine, prompts[0]))
    finally:
        engine.shutdown()


asyncio.run(main())
