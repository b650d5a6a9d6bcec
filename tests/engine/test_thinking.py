"""Budgets for thinking with the demo model, whose tokenizer has several tokens for </think>."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jengine import LLM, AsyncLLM, InvalidArgument, SamplingParams
from jengine.serving.http.embedded import EmbeddedApi
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL

# thinks, unless it is told not to
TEMPLATE = "{{ messages[-1].content }}{% if enable_thinking is false %}</think>{% else %}<think>{% endif %}\n"
THINKING: dict[str, Any] = {**SMALL, "num_pages": 400, "max_model_len": 400, "chat_template": TEMPLATE}
THINKING["dtype"] = "float32"
PROMPT = "def fib(n):<think>\n"
BUDGETS = 0, 3, 40  # the last one is not near for many steps, which need no mask
GREEDY = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)


def outputs(llm: LLM, work: list[tuple[str, SamplingParams]]) -> list[list[int]]:
    prompts, params = [list(part) for part in zip(*work, strict=True)]
    return [done.outputs[0].token_ids for done in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "more", [{}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}]
)
def test_the_end_is_forced_after_the_budget(more: dict[str, Any]) -> None:
    """Tokens before it are those without a budget; tokens after it are those of a prompt that has all of
    this. Other requests in the batch do not change.
    """
    with on_demand():
        llm = LLM("demo", progress=False, **THINKING, **more)
    end = llm.tokenizer.encode("</think>", add_special_tokens=False)
    work = [(PROMPT, GREEDY.clone(thinking_token_budget=budget)) for budget in BUDGETS]
    *bounded, plain, unthinking = outputs(
        llm, [*work, (PROMPT, GREEDY), ("def fib(n):\n", GREEDY.clone(thinking_token_budget=0))]
    )
    assert len(end) > 1 and [plain] == outputs(llm, [(PROMPT, GREEDY)])
    for budget, tokens in zip(BUDGETS, bounded, strict=True):
        whole = budget + len(end)
        assert tokens[:whole] == plain[:budget] + end
        prompt: Any = llm.tokenizer.encode(PROMPT) + tokens[:whole]
        [rest] = outputs(llm, [(prompt, GREEDY.clone(max_tokens=GREEDY.max_tokens - whole))])
        assert tokens[whole:] == rest
    assert [unthinking] == outputs(llm, [("def fib(n):\n", GREEDY)])
    assert llm.stats["compiles_since_start"] == 0


def test_a_grammar_begins_after_the_thought_and_all_apis_have_budgets() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    question = {"model": "demo", "messages": [{"role": "user", "content": "def f():"}], "max_tokens": 300}

    async def work() -> None:
        with on_demand():
            llm = AsyncLLM("demo", progress=False, **THINKING)
        async with llm:
            api = EmbeddedApi(llm, "demo")

            async def post(path: str, **body: Any) -> tuple[int, Any]:
                reply = await api.post(path, json.dumps({**question, **body}).encode())
                return reply.status, json.loads(reply.body)

            try:
                chat = "/v1/chat/completions"
                status, answer = await post(chat, thinking_token_budget=5, response_format=form)
                [choice] = answer["choices"]
                assert status == 200 and json.loads(choice["message"]["content"])["a"] in (1, 2), answer
                budget = {"type": "enabled", "budget_tokens": 5}
                output = {"format": {"type": "json_schema", "schema": schema}}
                status, answer = await post("/v1/messages", thinking=budget, output_config=output)
                thought, text = answer["content"]
                assert status == 200 and json.loads(text["text"])["a"] in (1, 2), answer
                assert len(llm.tokenizer.encode(thought["thinking"], False)) <= 5
                status, answer = await post(
                    chat, reasoning_effort="none", max_tokens=1, return_token_ids=True
                )
                assert llm.tokenizer.decode(answer["prompt_token_ids"]) == "def f():</think>"
                grammar = {"grammar": 'start: "a"'}
                status, answer = await post(chat, thinking_token_budget=5, structured_outputs=grammar)
                [choice] = answer["choices"]
                assert status == 200 and choice["message"]["content"] == "a", answer
                assert len(llm.tokenizer.encode(choice["message"]["reasoning_content"], False)) <= 5
            finally:
                api.close()

    asyncio.run(work())


def test_what_is_refused() -> None:
    for budget in (-2, 1.5, "3", True):
        with pytest.raises(InvalidArgument, match="thinking_token_budget"):
            SamplingParams(thinking_token_budget=budget)  # type: ignore[arg-type]
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    with on_demand():
        llm = LLM("demo", progress=False, **{**THINKING, "chat_template": "{{ messages[0].content }}"})
    with pytest.raises(InvalidArgument, match="this one's chat template has no </think>"):
        llm.generate("a", SamplingParams(thinking_token_budget=3), use_tqdm=False)
