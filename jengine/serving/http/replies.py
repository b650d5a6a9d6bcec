"""Members that answers of OpenAI's API share, with the fields that vLLM adds: usage, and log probabilities in
two formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from jengine import Logprob, RequestOutput, Tokenizer
from jengine.serving.calls.portions import Parts, Portions, array, long_array, width_of, with_members

Usage = dict[str, Any]
LOWEST = -9999.0  # in place of -inf, which JSON cannot represent; as in vLLM
Position = dict[int, Logprob] | None  # by token id, the token itself first; None for a prompt's first token


def usage(output: RequestOutput, completion_tokens: int) -> Usage:
    return _usage(len(output.prompt_token_ids), completion_tokens, output.num_cached_tokens or 0)


def usage_sum(parts: list[Usage]) -> Usage:
    """The sum over several prompts."""
    return _usage(
        sum(part["prompt_tokens"] for part in parts),
        sum(part["completion_tokens"] for part in parts),
        sum(part["prompt_tokens_details"]["cached_tokens"] for part in parts),
    )


def _usage(prompt: int, completion: int, cached: int) -> Usage:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def prompt_logprobs(portions: Portions, positions: Sequence[dict[int, Logprob] | None]) -> Parts:
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

    return await long_array(portions, positions, width_of(positions), shown)


class TokenTexts:
    """Represents tokens by their text, or as "token_id:5"."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def of(self, token: int, entry: Logprob | None = None) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        if entry is None or entry.decoded_token is None:
            return self._tokenizer.token_text(token)
        return entry.decoded_token

    def bytes_of(self, token: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token))


async def chat_logprobs(
    portions: Portions, positions: Sequence[Position], top: int, texts: TokenTexts
) -> Parts:
    """A choice's `logprobs`.

    Args:
        top: number of most likely tokens to list.
    """

    def content(positions: Sequence[Position]) -> list[dict[str, Any]]:
        return [_chat_entry(position, top, texts) for position in positions]

    return with_members(
        [b'{"refusal":null}'],
        {"content": await long_array(portions, positions, width_of(positions), content)},
    )


async def token_entries(
    portions: Portions, positions: Sequence[Position], top: int, texts: TokenTexts
) -> list[msgspec.Raw]:
    """For each token, its entry in a choice's `logprobs`, as JSON. Arguments as for `chat_logprobs`."""
    return [
        msgspec.Raw(msgspec.json.encode(_chat_entry(position, top, texts)))
        async for part in portions.slices(positions, width_of(positions))
        for position in part
    ]


def _chat_entry(position: Position, top: int, texts: TokenTexts) -> dict[str, Any]:
    def shown(token: int, entry: Logprob) -> dict[str, Any]:
        return {"token": texts.of(token, entry), "bytes": texts.bytes_of(token), "logprob": _finite(entry)}

    entries = list((position or {}).items())
    likeliest = sorted(entries, key=lambda item: item[1].rank)[:top]
    return {**shown(*entries[0]), "top_logprobs": [shown(*other) for other in likeliest]}


class Chain:
    """Positions of a prompt and of its output, which are not copied: they may be described when they are
    read.
    """

    def __init__(self, prompt: Sequence[Position], output: Sequence[Position]) -> None:
        self._prompt, self._output = prompt, output

    def __len__(self) -> int:
        return len(self._prompt) + len(self._output)

    def __getitem__(self, part: slice) -> list[Position]:
        start, stop, _ = part.indices(len(self))
        after = len(self._prompt)
        return [*self._prompt[start:stop], *self._output[max(start - after, 0) : max(stop - after, 0)]]


class CompletionLogprobs:
    """Log probabilities of one completion, built in pieces.

    Args:
        top: number of most likely tokens to list, in addition to the token itself.
        push: returns what the next tokens add to the choice's text, in which their offsets are.
    """

    def __init__(self, top: int, texts: TokenTexts, push: Callable[[list[int]], str]) -> None:
        self._top, self._texts, self._push, self._offset = top, texts, push, 0

    async def add(
        self, portions: Portions, token_ids: Sequence[int], positions: Sequence[Position] | Chain
    ) -> Parts:
        """Adds the next tokens. Returns their `logprobs`, as OpenAI's TextLogprobs with None for a prompt's
        first token.
        """
        columns: tuple[list[Parts], ...] = ([], [], [], [])
        assert len(token_ids) == len(positions)
        async for part in portions.slices(range(len(token_ids)), width_of(positions)):
            pairs = zip(token_ids[part[0] : part[-1] + 1], positions[part[0] : part[-1] + 1], strict=True)
            for column, values in zip(columns, self._columns(pairs), strict=True):
                column.append([msgspec.json.encode(values)[1:-1]])
        names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        (first, offsets), *others = zip(names, map(array, columns), strict=True)
        return with_members([b'{"%s":' % first.encode(), *offsets, b"}"], dict(others))

    def _columns(self, pairs: Iterable[tuple[int, Position]]) -> tuple[list[Any], ...]:
        tokens: list[str] = []
        values: list[float | None] = []
        likeliest: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, position in pairs:
            if position is None:
                text, value, best = self._texts.of(token), None, None
            else:
                text, value = self._texts.of(token, position[token]), _finite(position[token])
                best = {
                    self._texts.of(other, entry): _finite(entry)
                    for other, entry in position.items()
                    if other == token or entry.rank <= self._top
                }
            tokens.append(text)
            values.append(value)
            likeliest.append(best)
            offsets.append(self._offset)
            self._offset += len(self._push([token]))
        return offsets, values, tokens, likeliest


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)
