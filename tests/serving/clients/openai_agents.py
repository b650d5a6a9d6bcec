"""OpenAI's Agents SDK over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import CALL, RAIN, URL, check_called, rain
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return rain(city)


async def main() -> None:
    runs = 0
    for kind in OpenAIChatCompletionsModel, OpenAIResponsesModel:
        for streams in False, True:
            model = kind(model="mock", openai_client=AsyncOpenAI(base_url=URL, api_key="none"))
            settings = ModelSettings(max_tokens=400)
            agent = Agent(
                name="a", instructions="Be brief.", model=model, tools=[weather], model_settings=settings
            )
            if streams:
                result = Runner.run_streamed(agent, CALL)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, CALL)
            runs += 1
            assert RAIN in result.final_output, result.final_output
            check_called(runs)
            print(kind.__name__, "streamed" if streams else "whole", flush=True)


asyncio.run(main())
