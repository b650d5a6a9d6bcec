"""Replays outputs separately, outside the engine: raw logits from one pass over a sequence, then the oracle's
choice at each position."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jengine import CompletionOutput, Logprob, RequestOutput, SamplingParams, StructuredOutputs
from jengine.checkpoints import load, read_config
from jengine.models import Params, build
from jengine.parallel.mesh import make_mesh
from jengine.text.masks import bad_sequences
from jengine.text.tokenizer import Tokenizer
from tests.execution.oracle import Oracle, adjusted
from tests.models.dense import DenseCausal

ERROR = 2e-5  # of a logit: programs of other shapes sum in another order

# What outputs may have to look like, with every text that does.
LANGUAGES = {
    StructuredOutputs(choice=("abc", "abde", "h")): ["abc", "abde", "h"],
    StructuredOutputs(regex="[ab]{1,4}c?"): [
        "".join(letters) + end
        for count in range(1, 5)
        for letters in itertools.product("ab", repeat=count)
        for end in ("", "c")
    ],
    StructuredOutputs(json='{"enum": ["ab", 7]}'): ['"ab"', "7"],
    StructuredOutputs(grammar='start: "g" ("a" | "b" "d")~2 "f"'): ["gaaf", "gabdf", "gbdaf", "gbdbdf"],
}


class Replay:
    """A model that answers nothing: it says which answers are possible.

    Attributes:
        tokens: how many were checked; of them `certain` had no alternative.
        stuck: outputs that ended with an error because their parameters had come to forbid every token.

    Args:
        length: tokens of a sequence at most.
    """

    def __init__(self, folder: Path, length: int) -> None:
        config, mesh = read_config(folder), make_mesh(1)
        model = build(config, "float32", length)
        params = load(folder, model, mesh, progress=False)
        positions, one = np.arange(length, dtype=np.int32), np.zeros(length, np.int32)

        @jax.jit
        def logits(params: Params, tokens: jax.Array) -> jax.Array:
            module = model.bind(params)
            return module.logits(module.hidden(tokens, positions, DenseCausal(one, positions)))

        @jax.jit
        def draws(words: jax.Array) -> jax.Array:
            key = jax.random.key(0)
            for i in range(3):
                key = jax.random.fold_in(key, words[i])
            return jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(key, position)))(
                jnp.asarray(positions)
            )

        self._logits, self._draws, self._params, self._length = logits, draws, params, length
        self._tokenizer, self._eos, self._vocab = (
            Tokenizer.load(folder),
            config.eos_token_ids,
            config.vocab_size,
        )
        self._ends = np.isin(np.arange(self._vocab), [self._tokenizer.eos_token_id, *self._eos])
        self._texts = [self._tokenizer.token_text(token) for token in range(self._vocab)]
        self._continued: dict[tuple[StructuredOutputs, str], np.ndarray] = {}
        self.tokens = self.certain = self.stuck = 0
        # compiled here: an engine that is started later counts what is compiled since
        self.logits([0]), self.draws(0, 0)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Raw logits after each of these tokens, float32 [tokens, vocab]."""
        padded = np.zeros(self._length, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(self._logits(self._params, padded))[: len(tokens)]

    def draws(self, seed: int, sample_index: int) -> np.ndarray:
        """The number in [0, 1) that determines the token at each position."""
        return np.asarray(
            self._draws(np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF, sample_index], np.uint32))
        )

    def check(self, output: RequestOutput, params: SamplingParams, seed: int) -> None:
        """Checks every token, log probability and finish reason of a finished output."""
        assert output.finished and [completion.index for completion in output.outputs] == list(
            range(params.n)
        )
        for completion in output.outputs:
            self._check(output, completion, params, seed)

    def _check(
        self, output: RequestOutput, completion: CompletionOutput, params: SamplingParams, seed: int
    ) -> None:
        prompt, tokens = output.prompt_token_ids, completion.token_ids
        raw, draws = self.logits(prompt + tokens), self.draws(seed, completion.index)
        error = ERROR * max(params.repetition_penalty, 1 / params.repetition_penalty)
        end = completion.finish_reason, completion.stop_reason
        for i, token in enumerate(tokens):
            possible = Oracle(self._adjusted(raw, prompt, tokens[:i], params), params, error).possible(
                draws[len(prompt) + i]
            )
            assert token in possible, (params, completion.index, i, possible)
            self.tokens, self.certain = self.tokens + 1, self.certain + (len(possible) == 1)
            expected = self._end(params, len(prompt), tokens[: i + 1])
            assert expected == (end if i == len(tokens) - 1 and end[0] != "error" else (None, None)), (
                params,
                completion.index,
                i,
            )
        if end[0] == "error":
            assert not np.isfinite(self._adjusted(raw, prompt, tokens, params)).any(), (
                params,
                completion.index,
                end,
            )
            self.stuck += 1
            if not tokens:  # nor is there a prompt's score, if it came to that before the first token
                return
        assert completion.text == self._text(params, completion)
        self._check_logprobs(output, completion, params, raw)

    def _adjusted(
        self, raw: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams
    ) -> np.ndarray:
        """Logits for the next token."""
        stops = {*params.stop_token_ids, *self._eos} if len(output) < params.min_tokens else ()
        allowed = self._allowed(params, output)
        what = params.structured_outputs
        if (
            isinstance(what, StructuredOutputs)
            and not allowed[[t for t in range(self._vocab) if t not in stops]].any()
        ):
            ends = self._continues(what, output) & self._ends
            allowed, stops = (ends, ()) if ends.any() else (allowed, stops)
        return adjusted(
            raw[len(prompt) + len(output) - 1],
            params,
            prompt=prompt,
            output=output,
            allowed=allowed,
            stops=stops,
        )

    def _end(
        self, params: SamplingParams, prompt_len: int, output: list[int]
    ) -> tuple[str | None, int | str | None]:
        """Finish reason and stop reason after these tokens. Supports one ASCII stop string, without
        min_tokens.
        """
        if output[-1] in self._eos and not params.ignore_eos:
            return "stop", None
        if output[-1] in params.stop_token_ids:
            return "stop", output[-1]
        if any(stop in self._tokenizer.decode(output) for stop in params.stop):
            return "stop", params.stop[0]
        full = len(output) == params.max_tokens or prompt_len + len(output) == self._length
        return ("length" if full else None), None

    def _text(self, params: SamplingParams, completion: CompletionOutput) -> str:
        """The text without the stop token or stop string, unless these are included."""
        if not params.detokenize:
            return ""
        tokens, stop = completion.token_ids, completion.stop_reason
        stopped, include = completion.finish_reason == "stop", params.include_stop_str_in_output
        if stopped and not isinstance(stop, str) and not include:
            tokens = tokens[:-1]
        text = self._tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        if stopped and isinstance(stop, str):
            text = text[: text.index(stop) + (len(stop) if include else 0)]
        return text

    def _allowed(self, params: SamplingParams, output: list[int]) -> np.ndarray:
        """Tokens that masks allow next, bool [vocab]."""
        allowed = np.ones(self._vocab, bool)
        if params.allowed_token_ids is not None:
            allowed[:] = False
            allowed[list(params.allowed_token_ids)] = True
        for *beginning, last in bad_sequences(params.bad_words, self._tokenizer):
            if output[len(output) - len(beginning) :] == beginning:
                allowed[last] = False
        if isinstance(params.structured_outputs, StructuredOutputs):
            allowed &= self._continues(params.structured_outputs, output)
        return allowed

    def _continues(self, what: StructuredOutputs, output: list[int]) -> np.ndarray:
        """Tokens that continue one of a language's texts, or only an end after a complete one."""
        text = "".join(self._texts[token] for token in output if not self._ends[token])
        if (what, text) not in self._continued:
            texts = LANGUAGES[what]
            able = [
                bool(more) and any(known.startswith(text + more) for known in texts) for more in self._texts
            ]
            self._continued[what, text] = np.where(self._ends, text in texts, able)
        ended = any(self._ends[token] for token in output)
        return self._ends if ended else self._continued[what, text]

    def _check_logprobs(
        self, output: RequestOutput, completion: CompletionOutput, params: SamplingParams, raw: np.ndarray
    ) -> None:
        exact = raw - np.logaddexp.reduce(raw.astype(np.float64), -1, keepdims=True)
        prompt, start = output.prompt_token_ids, len(output.prompt_token_ids) - 1
        assert (completion.logprobs is None) == (params.logprobs is None) and (
            output.prompt_logprobs is None
        ) == (params.prompt_logprobs is None)
        if completion.logprobs is not None and params.logprobs is not None:
            for token, entry, row in zip(
                completion.token_ids, completion.logprobs, exact[start:], strict=False
            ):
                _check_entry(token, entry, row, params.logprobs)
            chosen = exact[start + np.arange(len(completion.token_ids)), completion.token_ids]
            assert abs(completion.cumulative_logprob - chosen.sum()) < 1e-3  # type: ignore[operator]
        if (
            output.prompt_logprobs is not None
            and params.prompt_logprobs is not None
            and completion.index == 0
        ):
            assert output.prompt_logprobs[0] is None
            for token, entry, row in zip(prompt[1:], output.prompt_logprobs[1:], exact[:start], strict=True):
                assert entry is not None
                _check_entry(token, entry, row, params.prompt_logprobs)


def _check_entry(token: int, entry: dict[int, Logprob], exact: np.ndarray, count: int) -> None:
    """Checks the token's own log probability and rank, and the `count` largest."""
    assert next(iter(entry)) == token and count <= len(entry) <= count + 1
    for other, one in entry.items():
        assert abs(one.logprob - exact[other]) < 1e-4
        assert (
            1 + (exact > exact[other] + 2 * ERROR).sum()
            <= one.rank
            <= (exact >= exact[other] - 2 * ERROR).sum()
        )
    assert {*range(1, count + 1)} <= {one.rank for one in entry.values()}
