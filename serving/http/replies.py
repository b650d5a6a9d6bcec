"""OpenAI's response types, with the fields that vLLM adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai.types import Completion as OpenAICompletion
from openai.types import CompletionChoice as OpenAICompletionChoice
from openai.types import CompletionUsage, Model
from openai.types.chat import ChatCompletion as OpenAIChatCompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChunk
from openai.types.chat import ChatCompletionMessage as OpenAIMessage
from openai.types.chat.chat_completion import Choice as OpenAIChoice
from openai.types.chat.chat_completion_chunk import Choice as OpenAIChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta as OpenAIDelta
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel, Field

from jengine import Logprob, RequestOutput
from jengine.serving.calls.portions import Portioned, width_of
from jengine.serving.http.parts import Parts, long_array


class CompletionChoice(OpenAICompletionChoice):
    """The short fields of a choice. `finish_reason` may also be "abort" (with a stop_reason) or "error"."""

    finish_reason: str | None = None  # type: ignore[assignment]
    stop_reason: int | str | None = None


class Completion(OpenAICompletion):
    choices: list[CompletionChoice] = Field(default_factory=list)  # type: ignore[assignment]  # added as parts


class Message(OpenAIMessage):
    reasoning_content: str | None = None


class ChatChoice(OpenAIChoice):
    """See CompletionChoice."""

    finish_reason: str | None = None  # type: ignore[assignment]
    message: Message
    stop_reason: int | str | None = None


class ChatCompletion(OpenAIChatCompletion):
    choices: list[ChatChoice] = Field(default_factory=list)  # type: ignore[assignment]  # added as parts


class Delta(OpenAIDelta):
    reasoning_content: str | None = None


class ChunkChoice(OpenAIChunkChoice):
    """See CompletionChoice."""

    finish_reason: str | None = None  # type: ignore[assignment]
    delta: Delta
    stop_reason: int | str | None = None


class Chunk(OpenAIChunk):
    choices: list[ChunkChoice] = Field(default_factory=list)  # type: ignore[assignment]  # added as parts


class ModelStatus(BaseModel):
    """Whether a model is loaded, and why not if it failed to load."""

    value: str
    why: str | None = None


class ServedModel(Model):
    """`root`: an adapter's path as it was given. `parent`: the model that an adapter changes.
    `max_model_len`: None if the model was never loaded.
    """

    root: str
    parent: str | None
    max_model_len: int | None
    status: ModelStatus


def usage(output: RequestOutput, completion_tokens: int) -> CompletionUsage:
    prompt = len(output.prompt_token_ids)
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion_tokens,
        total_tokens=prompt + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=output.num_cached_tokens or 0),
    )


def usage_sum(parts: list[CompletionUsage]) -> CompletionUsage:
    """The sum over several prompts."""
    prompt, completion = (
        sum(part.prompt_tokens for part in parts),
        sum(part.completion_tokens for part in parts),
    )
    cached = sum(
        (part.prompt_tokens_details and part.prompt_tokens_details.cached_tokens) or 0 for part in parts
    )
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


async def prompt_logprobs(portioned: Portioned, positions: Sequence[dict[int, Logprob] | None]) -> Parts:
    """Log probabilities of the prompt in vLLM's format."""

    def shown(positions: Sequence[dict[int, Logprob] | None]) -> list[Any]:
        return [
            None
            if position is None
            else {
                token: {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
                for token, entry in position.items()
            }
            for position in positions
        ]

    return await long_array(portioned, positions, width_of(positions), shown)


def text_of(reply: BaseModel) -> str:
    """JSON with the fields that are set."""
    return reply.model_dump_json(exclude_unset=True)
