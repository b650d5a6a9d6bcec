"""A mock engine that answers agents: a model without weights that calls a tool when its user asks for it.

The last turn of the prompt decides the answer:

- `CALL {"name": ..., "arguments": ...}` of a user: this call, if the prompt shows a tool of this name
- `ENDLESS` of a user: text without an end
- else every mark of the conversation, a word such as mark-a1: what the model was shown. It is text, or a call
  of the tool `final_answer`

Calls are in the format of Hermes and Qwen or, if the request's grammar forces one, JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from jengine import Tokenizer
from jengine.serving.processes.engines import WarmEngine
from jengine.spi import Request, TokenMask, TokenUpdate, Update
from tests.mocks.mock_engine import MockEngine, mock_engine

MARK = re.compile(r"\bmark-[a-z0-9]+\b")
TURN, RESULT = "<|im_start|>", "<tool_response>"
FINAL = "final_answer"  # a tool by which smolagents' models answer


class ScriptedEngine(MockEngine):
    """`tokenizer`: that of the server. `eos`: the token that ends an answer."""

    def __init__(self, tokenizer: Tokenizer, eos: int, **options: Any) -> None:
        super().__init__(eos_token_ids=(eos,), **options)
        self._tokenizer, self._eos = tokenizer, eos
        self._answers: dict[str, list[int]] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            prompt = self._tokenizer.decode(request.prompt_token_ids, False)
            before, *forms = (self._tokenizer.encode(text, False) for text in answers(prompt))
            self._answers[request.request_id] = [*before, *self._allowed(request.mask, before, forms)]
        super().add(*requests)

    def _allowed(self, mask: TokenMask | None, before: list[int], forms: list[list[int]]) -> list[int]:
        """The first form that may begin after these tokens, or the first one."""
        if mask is None:
            return forms[0]
        for token in before:
            mask.accept(token)
        words = np.full(-(-self.limits.vocab_size // 32), -1, np.int32).view(np.uint32)
        mask.fill(words)
        return next((form for form in forms if words[form[0] // 32] >> form[0] % 32 & 1), forms[0])

    def step(self) -> list[Update]:
        updates = super().step()
        for update in updates:
            if isinstance(update, TokenUpdate) and update.finish_reason is not None:
                self._answers.pop(update.request_id, None)
        return updates

    def _token(self, request: Request, place: int) -> int:
        tokens = self._answers[request.request_id]
        return tokens[place] if place < len(tokens) else self._eos


def answers(prompt: str) -> list[str]:
    """A thought, which may be empty, and the forms in which the model can say what follows."""
    thought = "" if prompt.endswith("</think>\n\n") else "<think>\nHm.\n</think>\n\n"
    turns, tools = prompt.split(TURN), prompt.partition(f"{TURN}user\n")[0]
    asked = next((turn for turn in reversed(turns) if turn.startswith("user\n")), "")
    if RESULT not in asked:
        if "ENDLESS" in asked:
            return [thought, "On and on. " * 20_000]
        if (call := _call(asked)) is not None and f'"name": "{call["name"]}"' in tools:
            return [thought, *_forms(call)]
    seen = "I have seen " + ", ".join(dict.fromkeys(MARK.findall(prompt))) + "."
    if f'"name": "{FINAL}"' not in tools:
        return [thought, seen]
    return [thought, *_forms({"name": FINAL, "arguments": {"answer": seen}})]


def _forms(call: dict[str, Any]) -> list[str]:
    """A call in the model's format, as `required` forces it, and as the tool's name does."""
    required = [{"name": call["name"], "parameters": call["arguments"]}]
    hermes = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return [hermes, json.dumps(required), json.dumps(call["arguments"])]


def _call(text: str) -> dict[str, Any] | None:
    """The last call that a user asks for."""
    place = text.rfind("CALL {")
    if place < 0:
        return None
    try:
        call: dict[str, Any] = json.JSONDecoder().raw_decode(text[place + len("CALL ") :])[0]
    except ValueError:  # a summary that cuts it
        return None
    return call


def scripted_engine(tokenizer_folder: str, **options: Any) -> WarmEngine:
    """For an engine process; see engines.py. The options are those of MockEngine."""
    made = mock_engine(tokenizer_folder)
    tokenizer = made.tokenizer
    assert tokenizer is not None
    [eos] = tokenizer.encode("</s>", False)
    vocab_size = max(tokenizer.encode("</s><tool>", False)) + 1
    engine = ScriptedEngine(tokenizer, eos, **{"vocab_size": max(vocab_size, 501), **options})
    return made._replace(engine=engine)
