"""A mock engine that answers agents: a model without weights that calls a tool when its user asks for it.

The last turn of the prompt decides the answer:

- `CALL {"name": ..., "arguments": ...}` of a user: this call, in the format of Hermes and Qwen, if the prompt
  shows a tool of this name
- `ENDLESS` of a user: text without an end
- else every mark of the conversation, a word such as mark-a1: what the model was shown. It is text, or a call
  of the tool `final_answer`
"""

from __future__ import annotations

import json
import re
from typing import Any

from jengine import Tokenizer
from jengine.serving.processes.engines import WarmEngine
from jengine.spi import Request, TokenUpdate, Update
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
            self._answers[request.request_id] = self._tokenizer.encode(answer(prompt), False)
        super().add(*requests)

    def step(self) -> list[Update]:
        updates = super().step()
        for update in updates:
            if isinstance(update, TokenUpdate) and update.finish_reason is not None:
                self._answers.pop(update.request_id, None)
        return updates

    def _token(self, request: Request, place: int) -> int:
        tokens = self._answers[request.request_id]
        return tokens[place] if place < len(tokens) else self._eos


def answer(prompt: str) -> str:
    """What the model says, after a thought."""
    thought = "" if prompt.endswith("</think>\n\n") else "<think>\nHm.\n</think>\n\n"
    return thought + _said(prompt)


def _said(prompt: str) -> str:
    turns, tools = prompt.split(TURN), prompt.partition(f"{TURN}user\n")[0]
    asked = next((turn for turn in reversed(turns) if turn.startswith("user\n")), "")
    if RESULT not in asked:
        if "ENDLESS" in asked:
            return "On and on. " * 20_000
        if (call := _call(asked)) is not None and f'"name": "{call["name"]}"' in tools:
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    seen = "I have seen " + ", ".join(dict.fromkeys(MARK.findall(prompt))) + "."
    if f'"name": "{FINAL}"' not in tools:
        return seen
    return f"<tool_call>\n{json.dumps({'name': FINAL, 'arguments': {'answer': seen}})}\n</tool_call>"


def _call(text: str) -> dict[str, Any] | None:
    """The last call that a user asks for."""
    place = text.rfind("CALL {")
    if place < 0:
        return None
    try:
        found: dict[str, Any] = json.JSONDecoder().raw_decode(text[place + len("CALL ") :])[0]
    except ValueError:  # a summary that cuts it
        return None
    return found


def scripted_engine(tokenizer_folder: str, **options: Any) -> WarmEngine:
    """For an engine process; see engines.py. The options are those of MockEngine."""
    made = mock_engine(tokenizer_folder)
    tokenizer = made.tokenizer
    assert tokenizer is not None
    [eos] = tokenizer.encode("</s>", False)
    vocab_size = max(tokenizer.encode("</s><tool>", False)) + 1
    engine = ScriptedEngine(tokenizer, eos, **{"vocab_size": max(vocab_size, 501), **options})
    return WarmEngine(engine, None, made.info)
