"""Log probabilities in the two formats of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs

from jengine import Logprob, Tokenizer

LOWEST = -9999.0  # in place of -inf, which JSON cannot represent; as in vLLM
Position = dict[int, Logprob] | None  # by token id, the token itself first; None for a prompt's first token


class TextLogprobs(Logprobs):
    """Log probabilities with None for a prompt's first token."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class TokenTexts:
    """Represents tokens by their text, or as "token_id:5"."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def of(self, token: int, entry: Logprob | None = None) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token) if entry is None or entry.decoded_token is None else entry.decoded_token


def chat_logprobs(positions: Iterable[Position], top: int, texts: TokenTexts) -> ChoiceLogprobs:
    """`top`: number of most likely tokens to list."""
    content = []
    for position in positions:
        (token, chosen), *_ = (position or {}).items()
        likeliest = sorted((position or {}).items(), key=lambda item: item[1].rank)[:top]
        shown = [(texts.of(other, entry), _finite(entry)) for other, entry in likeliest]
        text = texts.of(token, chosen)
        listed = [TopLogprob(token=name, bytes=_bytes(name), logprob=value) for name, value in shown]
        content.append(ChatCompletionTokenLogprob(token=text, bytes=_bytes(text), logprob=_finite(chosen), top_logprobs=listed))
    return ChoiceLogprobs(content=content, refusal=None)


class CompletionLogprobs:
    """Log probabilities of one completion, built in pieces.

    Args:
        top: number of most likely tokens to list, in addition to the token itself.
    """

    def __init__(self, top: int, texts: TokenTexts) -> None:
        self._top, self._texts, self._offset = top, texts, 0

    def add(self, token_ids: Sequence[int], positions: Sequence[Position]) -> TextLogprobs:
        """Adds the next tokens. Returns their log probabilities."""
        tokens: list[str] = []
        values: list[float | None] = []
        likeliest: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, position in zip(token_ids, positions, strict=True):
            if position is None:
                text, value, best = self._texts.of(token), None, None
            else:
                text, value = self._texts.of(token, position[token]), _finite(position[token])
                best = {
                    self._texts.of(other, entry): _finite(entry) for other, entry in position.items() if self._listed(other, token, entry)
                }
            tokens.append(text)
            values.append(value)
            likeliest.append(best)
            offsets.append(self._offset)
            self._offset += len(text)
        return TextLogprobs(text_offset=offsets, token_logprobs=values, tokens=tokens, top_logprobs=likeliest)

    def _listed(self, other: int, token: int, entry: Logprob) -> bool:
        return other == token or entry.rank <= self._top


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "replace"))
