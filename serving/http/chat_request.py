"""A conversation's request, checked, and how its completions are read."""

from __future__ import annotations

from typing import Any, NamedTuple

from jengine import AsyncLLM, CompletionOutput, RequestOutput, SamplingParams
from jengine.serving.answers import new_id
from jengine.serving.http import replies
from jengine.serving.http.bodies import Body
from jengine.serving.http.logprobs import TokenTexts, chat_logprobs
from jengine.serving.http.tool_choice import ToolChoice
from jengine.serving.parsers.events import Event, Parser, Reasoning, joined
from jengine.serving.parsers.formats import AnswerFormat


class Chat(NamedTuple):
    """A request that has been checked."""

    body: Body
    params: SamplingParams
    tools: ToolChoice
    form: AnswerFormat
    llm: AsyncLLM
    created: int
    model: str

    @property
    def constrained(self) -> bool:
        return self.params.structured_outputs is not None

    def parser(self, prompt: str) -> Parser:
        """For one completion."""
        return self.tools.forced_parser() or self.form.parser(prompt, self.tools.callable, self.constrained)

    def read(self, text: str, prompt: str) -> list[Event]:
        """A whole completion."""
        forced = self.tools.forced_parser()
        if forced is not None:
            return joined([*forced.push(text), *forced.finish()])
        return self.form.read(text, prompt, self.tools.callable, self.constrained)

    def shown(self, events: list[Event]) -> list[Event]:
        """Without what the client does not want."""
        if self.body.get("include_reasoning", True):
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

    def logprobs(self, completion: CompletionOutput) -> dict[str, Any]:
        """For a choice's fields."""
        if completion.logprobs is None or not completion.logprobs:
            return {}
        texts = TokenTexts(self.llm.tokenizer, self.body.get("return_tokens_as_token_ids", False))
        return {"logprobs": chat_logprobs(completion.logprobs, self.body.get("top_logprobs", 0), texts)}

    def ids(self, completion: CompletionOutput) -> dict[str, Any]:
        """For a choice's fields."""
        return {"token_ids": completion.token_ids} if self.body.get("return_token_ids") else {}

    def prompt_facts(self, output: RequestOutput) -> dict[str, Any]:
        """For an answer's fields."""
        facts: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if self.body.get("return_token_ids") else {}
        if output.prompt_logprobs is not None:
            facts["prompt_logprobs"] = replies.prompt_logprobs(output.prompt_logprobs)
        return facts


def reason(completion: CompletionOutput, called: bool) -> str | None:
    return "tool_calls" if called and completion.finish_reason == "stop" else completion.finish_reason


def call_id() -> str:
    return f"call_{new_id()}"


def prompt_text(chat: Chat, output: RequestOutput) -> str:
    """Its end is enough to know where the answer begins; a client's own template gives token ids only."""
    if output.prompt is not None:
        return output.prompt
    return chat.llm.tokenizer.decode(output.prompt_token_ids[-64:], skip_special_tokens=False)
