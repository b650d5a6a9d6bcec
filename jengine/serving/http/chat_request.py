"""A validated chat request, the reader of its completions, and the interface of APIs for conversations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jengine import AsyncLLM, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputs, TokensPrompt
from jengine.serving.calls.named_model import NamedModel
from jengine.serving.calls.portions import Portioned
from jengine.serving.http import parts, replies
from jengine.serving.http.bodies import Body
from jengine.serving.http.calls import HttpCall, id_headers
from jengine.serving.http.logprobs import TokenTexts, chat_logprobs
from jengine.serving.http.parts import Parts
from jengine.serving.http.tool_choice import ToolChoice
from jengine.serving.parsers.events import Arguments, Event, OutputParser, Reasoning, ToolCallStart, joined
from jengine.serving.parsers.formats import AnswerFormat
from jengine.serving.requests.answers import Aborts
from jengine.serving.requests.tracking import new_id
from jengine.spi import after_thought


class Chat(NamedTuple):
    """A validated request.

    Attributes:
        request: the fields in the form of its API.
        count_tokens: counts a text's tokens.
        prompt: the prompt's text, once it has been rendered.
        thinks: whether the model may reason before it answers; False if a grammar applies from the first
            token on.
    """

    body: Body
    params: SamplingParams
    tools: ToolChoice
    form: AnswerFormat
    llm: AsyncLLM
    created: int
    model: NamedModel
    request: Mapping[str, Any]
    count_tokens: Callable[[str], Awaitable[int]]

    prompt: str = ""
    thinks: bool = True

    def rendered(self, prompt: TokensPrompt) -> Chat:
        """Sets the prompt, which shows whether the model reasons first. Constraints on the answer apply after
        the reasoning."""
        text = prompt["prompt"]
        structure, inside = self.params.structured_outputs, self.form.reasoning(text, self.continues)
        tools, channels = self.tools, self.form.channels and not self.continues
        if not isinstance(structure, StructuredOutputs):
            if not (tools.plain and tools.callable) or self.continues:
                return self._replace(prompt=text)
            after = tools.or_any_text(inside)
        elif channels and (calls := tools.in_channels()) is not None:
            after = calls
        elif tools.forced is None and not self.continues and (tools.callable or channels):
            after = tools.or_text(structure, self.form, inside)
        elif inside is not None:
            after = tools.structure(inside) or after_thought(structure, inside)
        else:
            return self._replace(prompt=text, thinks=False)
        return self._replace(prompt=text, params=self.params.clone(structured_outputs=after))

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        return bool(self.body.get("continue_final_message"))

    def parser(self) -> OutputParser:
        """A parser for one completion."""
        tools = self.tools
        return self.form.parser(
            self.prompt, tools.callable, self.thinks, tools.forced_parser(), self.continues, tools.plain
        )

    def read(self, text: str) -> list[Event]:
        """Parses a whole completion. Returns the events that the client wants."""
        parser = self.parser()
        return self.shown(joined([*parser.push(text), *parser.finish()]))

    def shown(self, events: list[Event]) -> list[Event]:
        """The events that the client wants."""
        reasoning = self.body.get("include_reasoning", True)
        calls = self.body.get("max_tool_calls") if self.tools.parallel else 1
        return [
            event
            for event in events
            if (reasoning or not isinstance(event, Reasoning))
            and (calls is None or not isinstance(event, ToolCallStart | Arguments) or event.index < calls)
        ]

    async def logprobs(self, completion: CompletionOutput, portioned: Portioned) -> dict[str, Parts]:
        """Log probabilities for a choice's fields."""
        if completion.logprobs is None or not completion.logprobs:
            return {}
        texts = TokenTexts(self.llm.tokenizer, self.body.get("return_tokens_as_token_ids", False))
        return {
            "logprobs": await chat_logprobs(
                portioned, completion.logprobs, self.body.get("top_logprobs", 0), texts
            )
        }

    def ids(self, completion: CompletionOutput) -> dict[str, Parts]:
        """Token ids for a choice's fields, and which weights made them."""
        if not self.body.get("return_token_ids"):
            return {}
        return {
            "token_ids": parts.encoded(completion.token_ids),
            "weights_versions": parts.encoded(completion.weights_versions),
        }

    async def prompt_facts(self, output: RequestOutput, portioned: Portioned) -> dict[str, Parts]:
        """Facts about the prompt for a response's fields."""
        facts = (
            {"prompt_token_ids": parts.encoded(output.prompt_token_ids)}
            if self.body.get("return_token_ids")
            else {}
        )
        if output.prompt_logprobs is not None:
            facts["prompt_logprobs"] = await replies.prompt_logprobs(portioned, output.prompt_logprobs)
        return facts


def reason(completion: CompletionOutput, called: bool) -> str | None:
    return "tool_calls" if called and completion.finish_reason == "stop" else completion.finish_reason


def call_id() -> str:
    return f"call_{new_id()}"


class ChatInput(NamedTuple):
    """A body that has been read.

    Attributes:
        body: the same request in the fields of /v1/chat/completions.
        names: see HttpCall.
        request: the fields in the form of the API.
    """

    body: Body
    names: dict[str, str]
    request: Mapping[str, Any]


class AnswerStream(Protocol):
    """Sends an answer as events.

    Attributes:
        finished: whether the last output has been shown.
    """

    finished: bool

    async def start(self) -> None:
        """The request is queued."""

    async def show(self, output: RequestOutput) -> None:
        """Sends new output (of kind delta)."""

    async def end(self) -> None:
        """Ends the events."""


class ChatApi:
    """Base class of APIs.

    Attributes:
        path: of its requests, for logs.
        aborts: those that its answers show.
    """

    path: str
    aborts: Aborts

    def read(self, json_body: dict[str, Any]) -> ChatInput:
        """Validates a body. Raises InvalidArgument, naming the field."""
        raise NotImplementedError

    def headers(self, request_id: str) -> dict[str, str]:
        """Headers of an answer."""
        return id_headers(request_id)

    async def whole(self, chat: Chat, output: RequestOutput, request_id: str, portioned: Portioned) -> Parts:
        """A complete answer (of kind final)."""
        raise NotImplementedError

    def stream(
        self, call: HttpCall, chat: Chat, output: RequestOutput, request_id: str, portioned: Portioned
    ) -> AnswerStream:
        """A streamed answer. `output` is that of a request that has just been queued."""
        raise NotImplementedError

    async def begin_too_long(self, call: HttpCall, chat: Chat, request_id: str, portioned: Portioned) -> None:
        """The prompt of a streamed answer is too long: begins the stream if clients look for the error there,
        rather than for an HTTP status.
        """
