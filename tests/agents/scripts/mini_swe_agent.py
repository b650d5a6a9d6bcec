"""A task for mini-swe-agent: python mini_swe_agent.py URL MODEL PROMPT writes what the model said. No command
is run: the environment knows the answer to the only one that is asked for.
"""

from __future__ import annotations

import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.models.litellm_model import LitellmModel

url, model, prompt = sys.argv[1:]


class Harmless:
    """An environment without a shell."""

    config = None

    def execute(self, action, cwd=""):
        print("asked to run:", action["command"])
        return {"output": "mark-42", "returncode": 0, "exception_info": ""}

    def get_template_vars(self, **kwargs):
        return {}

    def serialize(self):
        return {}


agent = DefaultAgent(
    LitellmModel(model_name=f"openai/{model}", model_kwargs={"api_base": url, "api_key": "none"}),
    Harmless(),
    system_template="You are a programmer.",
    instance_template="{{ task }}",
    max_consecutive_format_errors=1,  # an answer without a call ends the task
)
agent.run(prompt)
for message in agent.messages:
    if (answer := message.get("extra", {}).get("response")) is not None:
        print(answer["choices"][0]["message"]["content"])
