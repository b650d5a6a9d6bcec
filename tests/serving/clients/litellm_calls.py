"""LiteLLM, as a client of OpenAI's APIs, of vLLM's and of Anthropic's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
from common import BASE, CALL, END, URL

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
HELLO = [{"role": "user", "content": "Hello." + END}]

for model, base in (
    ("openai/mock", URL),
    ("hosted_vllm/mock", URL),
    ("anthropic/mock", BASE),
    ("openai/responses/mock", URL),
):
    given: dict[str, Any] = {"model": model, "api_base": base, "api_key": "none", "max_tokens": 500}
    if "responses" not in model:  # which has no stop strings
        given["stop"] = [END]
    answer = litellm.completion(messages=HELLO, **given)
    assert "Hello." in answer.choices[0].message.content and answer.usage.total_tokens > 0, answer
    chunks = litellm.completion(messages=HELLO, stream=True, **given)
    assert "Hello." in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    messages: list[Any] = [{"role": "user", "content": CALL}]
    said = litellm.completion(messages=messages, tools=TOOLS, **given).choices[0].message
    [call] = said.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Köln"}
    messages += [
        said.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "It rains." + END},
    ]
    answer = litellm.completion(messages=messages, tools=TOOLS, **given)
    assert "It rains." in answer.choices[0].message.content, answer
    print(model, flush=True)

openai = {"model": "openai/mock", "api_base": URL, "api_key": "none"}
response = litellm.responses(input="Hello." + END, max_output_tokens=50, **openai)
assert "Hello." in response.output[-1].content[0].text, response
message = asyncio.run(
    litellm.anthropic.messages.acreate(
        model="anthropic/mock",
        api_base=BASE,
        api_key="none",
        max_tokens=100,
        messages=HELLO,
        stop_sequences=[END],
    )
)
assert message["content"][0]["text"] == "Hello.", message
try:
    litellm.embedding(input=["a"], **openai)
except litellm.exceptions.BadRequestError as refused:
    print(refused, flush=True)
else:
    raise AssertionError("this model has no embeddings")
