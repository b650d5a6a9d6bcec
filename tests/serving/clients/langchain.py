"""LangChain's chat models and LangGraph's agents over each API."""

from __future__ import annotations

from common import BASE, CALL, END, RAIN, URL, check_called, rain
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return rain(city)


class City(BaseModel):
    city: str


MODELS = {
    "chat": lambda **more: ChatOpenAI(
        model="mock", base_url=URL, stop_sequences=[END], max_tokens=500, **more
    ),
    "responses": lambda **more: ChatOpenAI(
        model="mock", base_url=URL, use_responses_api=True, max_tokens=500, **more
    ),
    "messages": lambda **more: ChatAnthropic(
        model="mock", base_url=BASE, stop_sequences=[END], max_tokens=500, **more
    ),
}
agents = 0
for api, make in MODELS.items():
    answer = make().invoke("Hello." + END)
    assert "Hello." in str(answer.text) and answer.usage_metadata["output_tokens"] > 0, answer
    assert "Hello." in "".join(str(part.text) for part in make().stream("Hello." + END))

    asked = {"messages": [("user", CALL)]}
    whole = create_react_agent(make(), [weather]).invoke(asked)["messages"]
    streamed = [*create_react_agent(make(streaming=True), [weather]).stream(asked, stream_mode="values")]
    for messages in whole, streamed[-1]["messages"]:
        assert RAIN in str(messages[-1].text), messages
    agents += 2
    check_called(agents)

    for method in "json_schema", "function_calling":  # a forced call is its arguments alone
        structured = make().with_structured_output(City, method=method)
        found = structured.invoke('{"city": "Köln"}' + END)
        assert found == City(city="Köln"), (api, method, found)
    print(api, flush=True)
