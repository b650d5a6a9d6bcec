"""What the scripts of this folder share. They run in a separate environment, as `python SCRIPT URL`,
against a server whose model repeats its prompt.
"""

from __future__ import annotations

import os
import sys

URL = sys.argv[1]  # of OpenAI's API, with /v1
BASE = URL.removesuffix("/v1")  # of Anthropic's
END = "<END>"  # where the model stops
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>' + END
RAIN = "It rains in Köln."
CALLED: list[str] = []  # the cities for which the tool was called

os.environ |= {
    "OPENAI_API_KEY": "none",
    "OPENAI_BASE_URL": URL,
    "ANTHROPIC_API_KEY": "none",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would be fetched otherwise
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
}


def rain(city: str) -> str:
    """The weather in a city, as the tool tells it."""
    CALLED.append(city)
    return f"It rains in {city}.{END}"


def check_called(times: int) -> None:
    assert ["Köln"] * times == CALLED, CALLED
