"""What requests say about thinking, in any API."""

from __future__ import annotations

from typing import Any

from jengine import InvalidArgument, SamplingParams, Tokenizer
from jengine.serving.http.bodies import Body
from jengine.serving.parsers.formats import AnswerFormat
from jengine.spi import can_bound

SWITCHES = {"enabled": True, "disabled": False}  # other types leave the choice to the model


def thinking_variables(thinks: bool) -> dict[str, Any]:
    """Variables of Qwen's and of DeepSeek's templates. Others ignore them."""
    return {"enable_thinking": thinks, "thinking": thinks}


def effort_variables(effort: str) -> dict[str, Any]:
    """A template's variables for an effort. Clients send it to every model; templates ignore variables that
    they do not know.
    """
    return {"reasoning_effort": effort, **(thinking_variables(False) if effort == "none" else {})}


def with_thinking(body: Body) -> tuple[Body, dict[str, str]]:
    """A chat's body in which vLLM's fields say what other servers' fields say about thinking, and the names
    of the latter by those of the former.

    Raises:
        InvalidArgument: two fields differ.
    """
    fields, names = dict(body.fields), dict[str, str]()

    def say(field: str, source: str, value: Any) -> None:
        if value is None:
            return
        if fields.setdefault(field, value) != value:
            other = names.get(field, field)
            raise InvalidArgument(source, value, f"differs from {other}={fields[field]}")
        names.setdefault(field, source)

    reasoning, switch = fields.pop("reasoning", {}), fields.pop("thinking", {})
    if isinstance(switch, bool):
        say("thinks", "thinking", switch)
        switch = {}
    say("thinks", "thinking.type", SWITCHES.get(switch.get("type")))
    say("thinks", "enable_thinking", fields.pop("enable_thinking", None))
    say("thinks", "reasoning.enabled", reasoning.get("enabled"))
    say("reasoning_effort", "reasoning.effort", reasoning.get("effort"))
    say("include_reasoning", "reasoning.exclude", False if reasoning.get("exclude") else None)
    say("thinking_budget", "thinking_budget_tokens", fields.pop("thinking_budget_tokens", None))
    say("thinking_budget", "thinking.budget_tokens", switch.get("budget_tokens"))
    say("thinking_budget", "reasoning.max_tokens", reasoning.get("max_tokens"))
    if (budget := fields.get("thinking_budget", 0)) < 0:
        raise InvalidArgument(names.get("thinking_budget", "thinking_budget"), budget, "must be at least 0")
    if (thinks := fields.pop("thinks", None)) is not None:
        variables = {**thinking_variables(thinks), **fields.get("chat_template_kwargs", {})}
        fields["chat_template_kwargs"] = variables
    return Body(fields, body.sampling), names


def with_thinking_budget(
    params: SamplingParams, body: Body, form: AnswerFormat, tokenizer: Tokenizer
) -> SamplingParams:
    """The parameters with a budget that clients also send to models that do not think.

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
