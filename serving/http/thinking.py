"""What requests say about thinking, in any API."""

from __future__ import annotations

from typing import Any

from jengine import InvalidArgument, SamplingParams, Tokenizer, can_bound
from jengine.serving.http.bodies import Body
from jengine.serving.parsers.formats import AnswerFormat

NOT_THINKING = {
    "enable_thinking": False,
    "thinking": False,
}  # variables of Qwen's and of DeepSeek's templates


def effort_variables(effort: str) -> dict[str, Any]:
    """A template's variables for an effort. Clients send it to every model; templates ignore variables that
    they do not know.
    """
    return {"reasoning_effort": effort, **(NOT_THINKING if effort == "none" else {})}


def with_thinking_budget(
    params: SamplingParams, body: Body, form: AnswerFormat, tokenizer: Tokenizer
) -> SamplingParams:
    """The parameters with the budget of /v1/messages, which clients also send to models that do not think.

    Raises:
        InvalidArgument: the model thinks, but where its thoughts end is not known here.
    """
    budget = body.get("thinking_budget")
    if budget is None or params.thinking_token_budget is not None:
        return params
    if can_bound(tokenizer):
        return params.clone(thinking_token_budget=budget)
    if form.marks_thoughts:
        raise InvalidArgument(
            "thinking_budget", budget, "this model's thoughts do not end with </think>: use adaptive"
        )
    return params
