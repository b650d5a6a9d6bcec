"""A conversation by smolagents: python smol_agents.py URL MODEL PROMPT ... writes each answer."""

from __future__ import annotations

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

url, model, *prompts = sys.argv[1:]


@tool
def look(word: str) -> str:
    """Looks at a word.

    Args:
        word: any word
    """
    return "mark-42"


agent = ToolCallingAgent(
    tools=[look],
    model=OpenAIModel(model, api_base=url, api_key="none", client_kwargs={"max_retries": 0}),
    max_steps=4,
    stream_outputs=True,
)
for place, prompt in enumerate(prompts):
    print("answer:", agent.run(prompt, reset=not place))
